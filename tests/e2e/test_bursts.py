"""Many at once: everyone gets an answer, nobody an error of ours, and one client is enough for a thousand."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import httpx
import pytest

from shoal.client import AsyncShoal
from tests.e2e.conftest import Server

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(600)]

SMALL = {"cpu_millis": 500, "memory_mib": 64, "disk_mib": 256, "pids": 32}


async def test_two_hundred_creates_at_once_each_get_a_result_and_no_500(server: Server) -> None:
    """Bare HTTP: queued ones go through `pending`; each runs its command within 120 s; no answer is a 5xx of ours."""
    statuses: Counter[int] = Counter()
    results: list[float] = []
    async with httpx.AsyncClient(
        base_url=server.url,
        headers={"authorization": f"Bearer {server.key}"},
        timeout=60,
        limits=httpx.Limits(max_connections=None),
    ) as client:

        async def one() -> None:
            began = time.monotonic()
            created = await client.post(
                "/v1/sessions", json={"image": "minimal:1", "resources": SMALL, "run": "burst"}
            )
            statuses[created.status_code] += 1
            id = created.json()["id"]
            while True:
                body = {"id": "a", "action": {"type": "exec", "command": "echo $((6 * 7))"}}
                response = await client.post(f"/v1/sessions/{id}/actions", json=body)
                statuses[response.status_code] += 1
                if response.status_code == 200:
                    break
                error = response.json()["error"]
                assert error["next"] in ("wait", "retry"), error
                await asyncio.sleep(error.get("retry_after_s", 0.5))
            assert response.json()["observation"]["stdout"] == "42\n"
            results.append(time.monotonic() - began)
            await client.delete(f"/v1/sessions/{id}")

        await asyncio.gather(*(one() for _ in range(200)))
    assert len(results) == 200
    assert max(results) < 120
    assert statuses[500] == 0, statuses


async def test_a_thousand_sessions_of_one_client_starve_nobody(server: Server) -> None:
    """One AsyncShoal drives 1,000 rollouts at once: none times out waiting for a connection of its own pool."""
    async with AsyncShoal(url=server.url, api_key=server.key) as shoal:

        async def rollout(number: int) -> str:
            async with shoal.session("minimal:1", run="thousand", resources=SMALL) as box:
                result = await box.exec(f"echo {number}")
                return result.stdout

        outputs = await asyncio.gather(*(rollout(number) for number in range(1000)))
    assert outputs == [f"{number}\n" for number in range(1000)]
