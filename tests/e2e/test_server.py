"""The server's own life: its start, its crash, its end."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import time
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import ROOT, Server, a_server, register
from tests.e2e.leftovers import leftovers

pytestmark = pytest.mark.root


def run_api(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "api", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def hosts_of(client: httpx.Client) -> int:
    pools = client.get("/v1/pools").json()["pools"]
    return sum(sum(pool["hosts"].values()) for pool in pools)


def running(client: httpx.Client, **fields: Any) -> str:
    response = client.post("/v1/sessions", json={"image": "minimal:1", "wait_s": 25, **fields})
    assert response.status_code == 201, response.text
    return str(response.json()["id"])


def test_two_servers_on_one_home_refuse(server: Server) -> None:
    """The second says who is there and exits with 1; the first does not notice."""
    second = run_api("up", "--home", str(server.home), "--port", "0")
    assert second.returncode == 1
    assert server.url in second.stderr
    assert "Traceback" not in second.stderr
    assert httpx.get(f"{server.url}/healthz").status_code == 200


def test_a_taken_port_is_said_in_one_line(server: Server, tmp_path: Any) -> None:
    """No traceback, exit code 1."""
    port = server.url.rpartition(":")[2]
    second = run_api("up", "--home", str(tmp_path / "h"), "--port", port)
    assert second.returncode == 1
    assert "cannot listen" in second.stderr
    assert "Traceback" not in second.stderr


def test_the_key_is_private_and_shown_once(server: Server) -> None:
    """0600; the log has it nowhere but in the one line of the first start."""
    assert stat.S_IMODE(server.credentials.stat().st_mode) == 0o600
    shown = [line for line in server.log.read_text().splitlines() if server.key in line]
    assert len(shown) == 1
    assert "admin key" in shown[0]


def test_without_a_key_nothing_is_told(server: Server) -> None:
    """Health and metrics are open; everything else is not."""
    for path in ("/healthz", "/readyz", "/metrics"):
        assert httpx.get(server.url + path).status_code == 200
    for path in ("/v1/sessions", "/v1/images", "/v1/pools"):
        assert httpx.get(server.url + path).status_code == 401
    assert httpx.post(f"{server.url}/internal/v1/hosts/x/heartbeat", json={}).status_code in (401, 422)


def test_a_crashed_server_finds_its_sessions_again() -> None:
    """kill -9 of the control plane: hosts and sandboxes live on, records are kept, the same key opens it."""
    with a_server() as server:
        register(server, "minimal")
        with server.client() as client:
            id = running(client, name="survivor", run="r")
            client.post(
                f"/v1/sessions/{id}/actions",
                json={"id": "before", "action": {"type": "exec", "command": "echo 1 > /f"}},
            )
        key = server.key
        server.kill()
        assert leftovers(server.home).processes, "the host died with the control plane"
        server.start()
        assert server.key == key
        with server.client() as client:
            found = client.get("/v1/sessions", params={"run": "r", "name": "survivor"}).json()["sessions"]
            assert [one["id"] for one in found] == [id]
            body = {"id": "after", "action": {"type": "exec", "command": "cat /f"}}
            record = client.post(f"/v1/sessions/{id}/actions", json=body).json()
            assert record["observation"]["stdout"] == "1\n"
            again = client.post(
                f"/v1/sessions/{id}/actions",
                json={"id": "before", "action": {"type": "exec", "command": "echo 1 > /f"}},
            ).json()
            assert again["replayed"]


def test_hosts_come_with_demand_and_go_without() -> None:
    """Zero at rest, one when a session is asked for, zero again after `idle_to_zero_s`."""
    with a_server("--idle-to-zero-s", "1", "--warm", "0") as server:
        register(server, "minimal")
        with server.client() as client:
            assert hosts_of(client) == 0
            id = running(client)
            assert hosts_of(client) == 1
            client.delete(f"/v1/sessions/{id}", params={"wait_s": 20})
            deadline = time.monotonic() + 60
            while hosts_of(client):
                assert time.monotonic() < deadline, "the last host did not go"
                time.sleep(0.2)
        assert not leftovers(server.home).mounts


def test_down_leaves_nothing_and_the_next_start_has_every_record() -> None:
    """Sessions that ran are ended with a cause; their trajectories are readable afterwards."""
    with a_server() as server:
        register(server, "minimal")
        with server.client() as client:
            id = running(client)
            body = {"id": "s", "action": {"type": "exec", "command": "echo kept"}}
            client.post(f"/v1/sessions/{id}/actions", json=body)
        stopped = run_api("down", "--home", str(server.home))
        assert stopped.returncode == 0, stopped.stderr
        assert server.process is not None
        assert server.process.wait(10) == 0
        server.process = None
        left = leftovers(server.home)
        assert not left, left
        assert run_api("down", "--home", str(server.home)).returncode == 0
        server.start()
        with server.client() as client:
            deadline = time.monotonic() + 60
            while (session := client.get(f"/v1/sessions/{id}").json())["state"] != "ended":
                assert time.monotonic() < deadline, session
                time.sleep(0.1)
            assert session["end"]["reason"]
            lines = client.get(f"/v1/sessions/{id}/trajectory").text.splitlines()
            assert [json.loads(line)["id"] for line in lines] == ["s"]
