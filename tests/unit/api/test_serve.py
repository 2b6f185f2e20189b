"""The router task: the same app, over shared state, leaving in good order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from api.options import ServeOptions, parse
from api.serve import DRAIN_S, LINGER_S, run_serve, serve
from api.serving import bind
from api.up import CannotStart
from provisioner.services import Services
from tests.unit.api.functions import World


async def test_it_serves_and_leaves_while_callers_look_elsewhere() -> None:
    """Told to stop, it is not ready at once, serves on for a while, answers who still waits, and ends; it reconciles
    nothing meanwhile."""
    world = World()
    await world.prepare()
    stop, waits = asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def opening() -> AsyncIterator[Services]:
        async with world.opening("router") as services:
            until = services.context.waiters.until

            async def noting(*asked: Any) -> Any:
                waits.set()
                return await until(*asked)

            services.context.waiters.until = noting
            yield services

    listener = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with listener:
        async with httpx.AsyncClient(
            base_url=url, headers={"authorization": f"Bearer {world.key}"}
        ) as client:
            serving = asyncio.create_task(serve(opening, listener, stop, linger_s=0.5, drain_s=1.0))
            assert (await client.get("/healthz")).status_code == 200
            assert (await client.get("/readyz")).status_code == 200
            made = await client.post("/v1/sessions", json={"image": "code:1", "wait_s": 0})
            assert made.status_code == 202
            waiting = asyncio.create_task(
                client.get(f"/v1/sessions/{made.json()['id']}", params={"wait_s": 25}, timeout=30)
            )
            await waits.wait()
            stop.set()
            while (await client.get("/readyz")).status_code == 200:
                continue
            assert (await client.get("/v1/sessions")).status_code == 200
            cut = await waiting
            assert (cut.status_code, cut.json()["error"]["code"]) == (503, "unavailable")
            await serving
    assert not world.capacity.starts
    await world.agent.stop()
    world.elsewhere.close()


async def test_its_loops_are_the_queues_and_the_upkeep_and_end_with_it() -> None:
    """No reconciler: that is the function's. Demand is written down by the upkeep."""
    world = World()
    await world.prepare()
    async with world.opening("router") as services:
        assert isinstance(services, Services)
        await services.start(reconciles=False)
        names = {task.get_name() for task in services._loops}
        assert names == {"upkeep", "queue"}
        await services.close()
        assert not services._loops
    await world.agent.stop()
    world.elsewhere.close()


def test_its_options_are_those_of_a_task() -> None:
    """It listens for the load balancer, logs JSON, and stays within the 30 s that ECS gives it to stop."""
    options = parse(["serve"])
    assert options == ServeOptions(
        profile="aws", role="router", host="0.0.0.0", port=8700, log_level="info", log_format="json"
    )
    with pytest.raises(SystemExit):
        parse(["serve", "--role", "reconciler"])
    assert LINGER_S < DRAIN_S < 27


def test_what_is_missing_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its settings it does not start, and says which ones."""
    for name in ("SHOAL_AWS_TABLE", "SHOAL_AWS_BUCKET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("api.logs.configure", lambda **_: None)
    with pytest.raises(CannotStart, match=r"table: Field required.*bucket: Field required"):
        run_serve(parse(["serve", "--host", "127.0.0.1", "--port", "0"]))  # type: ignore[arg-type]
