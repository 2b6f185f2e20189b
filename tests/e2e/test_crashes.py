"""Crashes in the middle of work: nothing runs twice, nothing is lost that had been answered."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.census import agent_pids
from tests.e2e.conftest import Server, a_server, register

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(600)]


def step(server: Server, session: str, id: str, command: str, seen: Counter[str]) -> dict[str, Any]:
    """One step, as a trainer's client does it: repeated under its id until it is answered."""
    body = {"id": id, "action": {"type": "exec", "command": command}}
    deadline = time.monotonic() + 60
    while True:
        assert time.monotonic() < deadline, seen
        try:
            with server.client() as client:
                response = client.post(f"/v1/sessions/{session}/actions", json=body)
        except httpx.TransportError:
            seen["no answer"] += 1
            time.sleep(0.1)
            continue
        if response.status_code == 200:
            record: dict[str, Any] = response.json()
            seen["replayed" if record["replayed"] else "ran"] += 1
            return record
        error = response.json()["error"]
        seen[error["code"]] += 1
        assert error["next"] in ("retry", "wait"), error
        time.sleep(error.get("retry_after_s", 0.2))


@pytest.mark.parametrize("victim", ["agent", "server"])
def test_killed_again_and_again_every_step_runs_once(victim: str) -> None:
    """A counter file in the sandbox: as many lines as there were steps, whoever was killed in between."""
    with a_server() as server:
        register(server, "minimal")
        with server.client() as client:
            created = client.post("/v1/sessions", json={"image": "minimal:1", "wait_s": 25})
            session = created.json()["id"]
        seen: Counter[str] = Counter()
        steps = 0
        for round in range(4):
            killer: threading.Timer | None = None
            for number in range(25):
                if number == 10:
                    if victim == "agent":
                        (pid,) = agent_pids(server.home)
                        killer = threading.Timer(0.004 * round, os.kill, (pid, signal.SIGKILL))
                        killer.start()
                    else:
                        server.kill()
                        server.start()
                step(server, session, f"{round}-{number}", "echo x >> /count", seen)
                steps += 1
            if killer is not None:
                killer.join()
        record = step(server, session, "count", "wc -l < /count", seen)
        assert record["observation"]["stdout"].strip() == str(steps), seen
        assert record["seq"] == steps + 1
        with server.client() as client:
            assert client.delete(f"/v1/sessions/{session}", params={"wait_s": 20}).json()["state"] == "ended"
            lines = client.get(f"/v1/sessions/{session}/trajectory").text.splitlines()
        assert len(lines) == steps + 1


def test_a_host_that_is_lost_is_told_as_such() -> None:
    """Agent, holder and guests killed at once: the session ends with `host_lost`, never as a failed command."""
    with a_server(SHOAL_PROVISIONER_LEASE_S="2", SHOAL_PROVISIONER_LOST_MARGIN_S="1.5") as server:
        register(server, "minimal")
        with server.client() as client:
            session = client.post("/v1/sessions", json={"image": "minimal:1", "wait_s": 25}).json()["id"]
            for entry in Path("/proc").iterdir():
                if not entry.name.isdigit():
                    continue
                try:
                    marked = b"SHOAL_HOST_ID=" in (entry / "environ").read_bytes()
                    ours = str(server.home).encode() in (entry / "cmdline").read_bytes()
                except OSError:
                    continue
                if marked and ours:
                    os.kill(int(entry.name), signal.SIGKILL)
            deadline = time.monotonic() + 60
            while (told := client.get(f"/v1/sessions/{session}").json())["state"] != "ended":
                assert time.monotonic() < deadline, told
                time.sleep(0.2)
            assert told["end"]["reason"] == "host_lost"
            body = {"action": {"type": "exec", "command": "true"}}
            response = client.post(f"/v1/sessions/{session}/actions", json=body)
            assert response.json()["error"]["code"] == "session_ended"
            assert response.json()["error"]["details"]["end"]["reason"] == "host_lost"
            # and the next session gets a host again
            again = client.post("/v1/sessions", json={"image": "minimal:1", "wait_s": 25}).json()
            body = {"action": {"type": "exec", "command": "echo on"}}
            response = client.post(f"/v1/sessions/{again['id']}/actions", json=body)
            assert response.json()["observation"]["stdout"] == "on\n"
