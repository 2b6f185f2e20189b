"""A tiny control plane, and an agent process that belongs to it: what the agent's integration tests drive.

The control plane is real HTTP and real files; it decides nothing by itself. Tests set what the next heartbeat's reply
orders, and read what heartbeats reported.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import jwt
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from shoal.contract.base import HostId, SessionId, TenantId, new_id
from shoal.contract.host import (
    Heartbeat,
    HeartbeatReply,
    Registered,
    SandboxSource,
    SandboxStart,
    SnapshotTake,
    WarmKey,
    WarmOrder,
)
from shoal.contract.images import ImageConfig, Layer
from shoal.contract.route import ISSUER, PublicKey
from shoal.contract.sessions import Resources
from shoal.contract.states import Substrate
from shoal.contract.urls import Url, Urls, UrlsAsked

HOST = HostId("hst_test")
HOST_TOKEN = "host-token"
SMALL = Resources(cpu_millis=1000, memory_mib=256, disk_mib=256, pids=128)


def image_source(directory: Path) -> SandboxSource:
    """A built image (image.json and its blobs) as what a sandbox starts from."""
    image = json.loads((directory / "image.json").read_text())
    layers = [Layer.model_validate(layer) for layer in image["layers"]]
    return SandboxSource(
        digest=layers[-1].digest,
        image_digest=layers[-1].digest,
        layers=layers,
        config=ImageConfig.model_validate(image["config"]),
    )


class Control:
    """The control plane's side of host.py, over HTTP."""

    def __init__(self, root: Path, images: Sequence[Path]) -> None:
        self.blobs = root / "blobs"
        self.blobs.mkdir()
        for image in images:
            for blob in image.glob("*.tar.zst"):
                (self.blobs / blob.name.removesuffix(".tar.zst")).symlink_to(blob)
        self._key = Ed25519PrivateKey.generate()
        raw = self._key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        self.keys = [PublicKey(kid="k1", x=base64.urlsafe_b64encode(raw).decode().rstrip("="))]
        self.beats: list[Heartbeat] = []
        self.registered = 0
        self.reply: dict[str, Any] = {}
        self.ack = True
        self.silent = False
        self.no_urls = False
        self.left = False
        self.lease_s = 30.0
        self._beaten = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self) -> None:
        """Listen on the loopback."""
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/internal/v1/hosts:register", self._register)
        app.router.add_post("/internal/v1/hosts/{host}/heartbeat", self._heartbeat)
        app.router.add_post("/internal/v1/hosts/{host}/urls", self._urls)
        app.router.add_post("/internal/v1/hosts/{host}/leave", self._leave)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def stop(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _register(self, request: web.Request) -> web.Response:
        await request.read()
        self.registered += 1
        answer = Registered(
            host=HOST, pool="default", token=HOST_TOKEN, lease_s=self.lease_s, heartbeat_s=0.2, keys=self.keys
        )
        return web.Response(text=answer.model_dump_json(), content_type="application/json")

    async def _heartbeat(self, request: web.Request) -> web.Response:
        assert request.headers["authorization"] == f"Bearer {HOST_TOKEN}"
        beat = Heartbeat.model_validate_json(await request.read())
        if self.silent:
            return web.Response(status=503)
        self.beats.append(beat)
        acked = {}
        if self.ack:
            acked = {
                "acked_usage": len(beat.usage),
                "acked_event": max((event.n for event in beat.events), default=0),
            }
        reply = HeartbeatReply(
            lease_s=self.lease_s, heartbeat_s=0.2, keys=self.keys, **{**acked, **self.reply}
        )
        self._beaten.set()
        self._beaten = asyncio.Event()
        return web.Response(text=reply.model_dump_json(), content_type="application/json")

    def _place(self, op: str, item: Any) -> Path:
        if op.startswith("layer"):
            return self.blobs / str(item.digest).partition(":")[2]
        return self.blobs / f"journal-{item.session}-{item.epoch}"

    async def _urls(self, request: web.Request) -> web.Response:
        asked = UrlsAsked.model_validate_json(await request.read())
        if self.no_urls:
            return web.Response(status=503)
        urls = []
        for item in asked.items:
            place = self._place(item.op, item)
            urls.append(Url(url=place.as_uri(), exists=item.op == "layer_put" and place.exists()))
        return web.Response(text=Urls(urls=urls).model_dump_json(), content_type="application/json")

    async def _leave(self, request: web.Request) -> web.Response:
        await request.read()
        self.left = True
        return web.Response(text="{}")

    async def beat_where(self, wanted: Callable[[Heartbeat], bool], timeout_s: float = 20.0) -> Heartbeat:
        """The first heartbeat from now on that fits."""
        async with asyncio.timeout(timeout_s):
            while True:
                # Not the last one that came: its agent may have died since.
                await self._beaten.wait()
                if wanted(self.beats[-1]):
                    return self.beats[-1]

    def token(self, *, kind: str = "session", session: str = "", epoch: int = 0, **claims: Any) -> str:
        """A route token."""
        now = int(time.time())
        payload = {
            "iss": ISSUER,
            "aud": HOST,
            "kind": kind,
            "sub": session,
            "epo": epoch,
            "scp": ["sessions"],
            "iat": now,
            "exp": now + 55,
            **claims,
        }
        return jwt.encode(payload, self._key, algorithm="EdDSA", headers={"kid": "k1"})


class AgentProcess:
    """One agent on a home of its own."""

    def __init__(self, control: Control, home: Path, *, holder: bool = False, **options: Any) -> None:
        self.control = control
        self.home = home
        self.holder = holder
        self.options = options
        self.env: dict[str, str] = {}
        self.process: asyncio.subprocess.Process | None = None
        self.address = ""
        self._http: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Start it, and wait until it has beaten."""
        argv = [sys.executable, "-m", "runtime_image.agent"]
        options = {
            "control-url": self.control.url,
            "join-token": "join",
            "home": str(self.home),
            "layers-dir": str(self.home.parent / "layers"),
            "guest-dir": str(self.home.parent / "guest"),
            "disk-floor-mib": 0,
            **{name.replace("_", "-"): value for name, value in self.options.items()},
        }
        if self.holder:
            socket_path = self.home.parent / f"{self.home.name}.sock"
            options["holder"] = str(socket_path)
            argv = [
                sys.executable,
                "-m",
                "runtime_image.agent.holder",
                "--socket",
                str(socket_path),
                "--",
                *argv,
            ]
        for name, value in options.items():
            argv += [f"--{name}", str(value)]
        before = len(self.control.beats)
        with (self.home.parent / f"{self.home.name}.log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *argv, env={**os.environ, **self.env}, stderr=log
            )
        await self.control.beat_where(lambda _: len(self.control.beats) > before)
        self.address = self.control.beats[-1].address

    def log(self) -> str:
        """What it has logged."""
        return (self.home.parent / f"{self.home.name}.log").read_text()

    @property
    def http(self) -> aiohttp.ClientSession:
        """A client session."""
        if self._http is None:
            self._http = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=60), connector=aiohttp.TCPConnector(limit=0)
            )
        return self._http

    def pid_of_agent(self) -> int:
        """The agent's own pid, also below a holder."""
        assert self.process is not None
        if not self.holder:
            return self.process.pid
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])

    async def call(
        self, method: str, path: str, *, token: str, body: Any = None, **options: Any
    ) -> tuple[int, Any]:
        """(status, JSON) of a call."""
        headers = {"authorization": f"Bearer {token}", **options.pop("headers", {})}
        data = options.pop("data", None)
        if body is not None:
            data = body if isinstance(body, bytes | str) else json.dumps(body)
        async with self.http.request(
            method, self.address + path, data=data, headers=headers, **options
        ) as answer:
            raw = await answer.read()
            kind = answer.content_type
            return answer.status, json.loads(raw) if kind == "application/json" else raw

    async def stop(self, *, timeout_s: float = 30.0) -> int:
        """SIGTERM, and wait."""
        if self._http is not None:
            await self._http.close()
            self._http = None
        if self.process is None:
            return 0
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(timeout_s):
            return await self.process.wait()

    async def create(self, source: SandboxSource, *, session: str | None = None, **fields: Any) -> BoxHandle:
        """Start a sandbox, and wait until it runs."""
        name = SessionId(session or new_id("ses"))
        fields = {"resources": SMALL, "epoch": 1, "wait_s": 25.0, **fields}
        spec = SandboxStart(
            session=name,
            tenant=TenantId("ten_test"),
            pool="default",
            source=source,
            substrate=Substrate.CONTAINER,
            expires_at=datetime.now(UTC) + timedelta(hours=1),
            **fields,
        )
        box = BoxHandle(self, name, spec.epoch)
        box.status_code, box.status = await self.call(
            "PUT", f"/v1/sandboxes/{name}", token=box.control_token, body=spec.model_dump_json()
        )
        return box


class BoxHandle:
    """A session's sandbox, as a test drives it."""

    def __init__(self, agent: AgentProcess, session: SessionId, epoch: int) -> None:
        self.agent = agent
        self.session = session
        self.epoch = epoch
        self.status_code = 0
        self.status: Any = None
        self._token = ""
        self._token_at = 0.0

    @property
    def control_token(self) -> str:
        """A token that commands this sandbox."""
        return self.agent.control.token(kind="control", session=self.session)

    @property
    def token(self) -> str:
        """A token for its session."""
        if time.monotonic() - self._token_at > 30:
            self._token = self.agent.control.token(session=self.session, epoch=self.epoch)
            self._token_at = time.monotonic()
        return self._token

    async def post(self, **body: Any) -> tuple[int, Any]:
        """POST .../actions."""
        return await self.agent.call(
            "POST", f"/v1/sessions/{self.session}/actions", token=self.token, body=body
        )

    async def act(self, type: str = "exec", *, id: str | None = None, **fields: Any) -> Any:
        """Make a step; its observation."""
        status, record = await self.post(id=id, action={"type": type, **fields}, wait_s=25)
        assert status == 200, (status, record)
        return record["observation"]

    async def sh(self, command: str, **fields: Any) -> Any:
        """Run a command line."""
        return await self.act("exec", command=command, **fields)

    async def get(self, path: str, **options: Any) -> tuple[int, Any]:
        """GET below the session."""
        return await self.agent.call("GET", f"/v1/sessions/{self.session}{path}", token=self.token, **options)

    async def delete(self, wait_s: float = 20) -> tuple[int, Any]:
        """End it."""
        return await self.agent.call(
            "DELETE",
            f"/v1/sandboxes/{self.session}?epoch={self.epoch}&reason=deleted&wait_s={wait_s}",
            token=self.control_token,
        )

    async def snapshot(self, **fields: Any) -> Any:
        """Take a snapshot and wait for it."""
        take = SnapshotTake(snapshot=new_id("snp"), epoch=self.epoch, wait_s=25.0, **fields)
        _, taken = await self.agent.call(
            "POST",
            f"/v1/sandboxes/{self.session}/snapshots",
            token=self.control_token,
            body=take.model_dump_json(),
        )
        return taken


def source_of(taken: Any) -> SandboxSource:
    """What starts from a snapshot."""
    return SandboxSource(
        digest=taken["layers"][-1]["digest"],
        image_digest=taken["image_digest"],
        snapshot=taken["snapshot"],
        layers=[Layer.model_validate(layer) for layer in taken["layers"]],
        config=ImageConfig.model_validate(taken["config"]),
    )


def warm_order(source: SandboxSource, count: int, disk_mib: int = 256) -> WarmOrder:
    """Keep so many warm."""
    key = WarmKey(digest=source.digest, substrate=Substrate.CONTAINER, disk_mib=disk_mib)
    return WarmOrder(key=key, source=source, count=count)


@asynccontextmanager
async def control_plane(root: Path, images: Sequence[Path]) -> AsyncIterator[Control]:
    """A control plane for as long as the block runs."""
    control = Control(root, images)
    await control.start()
    try:
        yield control
    finally:
        await control.stop()


@asynccontextmanager
async def running_agent(control: Control, home: Path, **options: Any) -> AsyncIterator[AgentProcess]:
    """An agent for as long as the block runs; it is stopped, or killed where it does not stop."""
    agent = AgentProcess(control, home, **options)
    try:
        await agent.start()
        yield agent
    finally:
        control.silent = control.no_urls = False
        try:
            await agent.stop()
        except TimeoutError:
            assert agent.process is not None
            with contextlib.suppress(ProcessLookupError):
                agent.process.kill()
            raise
