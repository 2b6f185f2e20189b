"""The entrances over DynamoDB and S3 as MiniStack has them: Lambda events in this process, the router as a program."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from provisioner import handlers, keys
from provisioner.aws import profile
from provisioner.aws.profile import open_services
from provisioner.aws.settings import AwsSettings
from provisioner.blobs import names
from provisioner.lease import Lease
from provisioner.manifests import digest_of
from provisioner.store.table import create_table
from shoal.contract.images import ImageManifest, ImagePut, Layer, LayersSource
from tests.emulators import aws_clients, aws_environment, fresh_name
from tests.unit.api.functions import WHO, World, function_world
from tests.unit.api.test_handlers import WAKE, Context

ROOT = Path(__file__).resolve().parents[3]


class Cloud(World):
    """State in an emulated cloud, reached by the profile's own adapters; hosts and agents stay fakes."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self.environment = aws_environment(url)
        self.aws = AwsSettings(table=fresh_name("table"), bucket=fresh_name("bucket"))

    def opening(self, role: str = "api") -> Any:
        return open_services(
            self.aws,
            self.settings,
            role=role,  # type: ignore[arg-type]
            agents=self.agents,
            capacity=self.capacity,
        )

    async def prepare(self) -> None:
        await self.agent.__aenter__()
        clients = aws_clients(self.url)
        await create_table(clients, self.aws.table)
        await (await clients.get("s3")).create_bucket(Bucket=self.aws.bucket)
        await clients.close()
        async with self.opening("router") as services:
            await services.signer.refresh()
            made = await services.auth.bootstrap()
            assert made is not None
            self.key = made.secret
            data = b"a layer"
            digest = digest_of(data)
            await services.blobs.put_if_absent(names.layer(digest), data)
            layer = Layer(digest=digest, diff_id=digest, size_bytes=len(data))
            manifest = ImageManifest(architecture="amd64", layers=[layer])
            await services.images.put(
                WHO, "code", "1", ImagePut(source=LayersSource(manifest=manifest), wait_s=5)
            )
            await services.context.background.idle()


@pytest.fixture
def cloud(ministack: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    for name, value in aws_environment(ministack).items():
        monkeypatch.setenv(name, value)
    with function_world(monkeypatch, Cloud(ministack)) as opened:
        assert isinstance(opened, Cloud)
        yield opened


def test_a_run_goes_through_functions_over_shared_state(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A create waits and wakes the reconciler; its function starts a host; the host's registration places the session;
    bytes pass, the session ends, and what is idle goes away: every step an event of its own."""
    monkeypatch.setattr(profile, "open_services", lambda aws, settings, role: cloud.opening(role))
    monkeypatch.setattr(handlers, "configure", lambda: None)
    monkeypatch.setenv("SHOAL_AWS_TABLE", cloud.aws.table)
    monkeypatch.setenv("SHOAL_AWS_BUCKET", cloud.aws.bucket)
    try:
        made = cloud.post("/v1/sessions", {"image": "code:1", "wait_s": 0, "name": "one", "run": "r"})
        assert (made.status, made.json()["state"]) == (202, "pending")
        id = made.json()["id"]
        again = cloud.post("/v1/sessions", {"image": "code:1", "wait_s": 0, "name": "one", "run": "r"})
        assert again.json()["id"] == id
        assert cloud.elsewhere.run(_wake(cloud)) >= 1

        assert handlers.reconcile(WAKE, Context(12)) == {"batchItemFailures": []}
        (start,) = cloud.capacity.starts
        host = cloud.agents.add(start.host, capacity=cloud.settings.pools[0].host_capacity)
        host.address = cloud.agent.address
        answer = cloud.post(
            "/internal/v1/hosts:register",
            {
                "join_token": start.join_token,
                "boot_id": host.boot_id,
                "address": host.address,
                "capacity": host.capacity.model_dump(),
                "substrates": ["container"],
                "version": "test",
            },
        )
        assert answer.status == 200, answer.body
        assert cloud.call("GET", f"/v1/sessions/{id}").json()["state"] == "running"

        content = bytes(range(256)) * 100
        put = cloud.call(
            "PUT",
            f"/v1/sessions/{id}/files",
            query={"path": "/x"},
            body=content,
            headers={"content-type": "application/octet-stream"},
        )
        assert put.body == content
        snapshot = cloud.post(f"/v1/sessions/{id}/snapshots", {"wait_s": 0})
        assert snapshot.status in (201, 202), snapshot.body
        assert snapshot.json()["id"] in host.snapshots

        assert cloud.call("DELETE", f"/v1/sessions/{id}").status in (200, 202)
        assert cloud.call("GET", f"/v1/sessions/{id}").json()["state"] == "ended"
        assert cloud.call("GET", "/v1/sessions").json()["sessions"] == []
    finally:
        handlers.close()


async def _wake(cloud: Cloud) -> int:
    async with cloud.opening("router") as services:
        stored = await services.store.get(keys.WAKE)
        return stored.version if stored is not None else 0


def _ask(url: str, key: str = "", body: Any = None, method: str | None = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    request = urllib.request.Request(url, data=data, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=40) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_the_router_is_a_program_over_the_same_state(cloud: Cloud) -> None:
    """`python -m api serve` finds what functions wrote, is seen by them, and leaves when it is told to."""
    made = cloud.post("/v1/sessions", {"image": "code:1", "wait_s": 0})
    id = made.json()["id"]
    port = _free_port()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")},
        **cloud.environment,
        "SHOAL_AWS_TABLE": cloud.aws.table,
        "SHOAL_AWS_BUCKET": cloud.aws.bucket,
    }
    command = [sys.executable, "-m", "api", "serve", "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, bufsize=0)
    url = f"http://127.0.0.1:{port}"
    try:
        assert process.stderr is not None
        said = b""
        while b"server.ready" not in said:
            line = process.stderr.readline()
            said += line
            assert line, said
        assert _ask(url + "/readyz")[0] == 200
        assert _ask(f"{url}/v1/sessions/{id}", cloud.key)[1]["state"] == "pending"
        assert _ask(f"{url}/v1/sessions/{id}", cloud.key, method="DELETE")[0] in (200, 202)
        assert cloud.call("GET", f"/v1/sessions/{id}").json()["state"] == "ended"
    finally:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert b"server.stopped" in errors


def _free_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_of_many_reconcilers_over_the_table_one_has_the_lease(cloud: Cloud) -> None:
    """Sixteen take it at once, round after round: it is one's each time, and free when that one has given it back."""

    async def rounds() -> list[int]:
        async with cloud.opening("reconciler") as services:
            winners: list[int] = []
            for number in range(5):
                leases = [Lease(services.context.store, services.clock, f"{number}-{n}") for n in range(16)]
                taken = await asyncio.gather(*(lease.take() for lease in leases))
                winners.append(sum(taken))
                await leases[taken.index(True)].release()
            return winners

    assert cloud.elsewhere.run(rounds()) == [1] * 5
