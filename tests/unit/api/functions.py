"""A Lambda function in this process: events of an HTTP API in, answers out, agents on a loop of their own."""

from __future__ import annotations

import asyncio
import base64
import threading
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import unquote, urlencode

import pytest

from api import lambda_handler
from provisioner.agents.fake import FakeAgents, FakeHost
from provisioner.auth import DEFAULT_TENANT, Principal
from provisioner.aws.profile import open_services
from provisioner.aws.settings import AwsSettings
from provisioner.blobs import names
from provisioner.blobs.fake import FakeBlobs
from provisioner.capacity.fake import FakeCapacity
from provisioner.clock import SystemClock
from provisioner.manifests import digest_of
from provisioner.settings import PoolSettings, ProvisionerSettings
from provisioner.store.fake import FakeStore
from provisioner.store.port import Store
from shoal.contract.base import KeyId
from shoal.contract.host import Capacity
from shoal.contract.images import ImageManifest, ImagePut, Layer, LayersSource
from shoal.contract.states import Scope
from tests.unit.api.fakes import ScriptedAgent

T = TypeVar("T")
SHAPE = Capacity(cpu_millis=8000, memory_mib=8192, disk_mib=65_536, sandboxes=8)
WHO = Principal(tenant=DEFAULT_TENANT, key=KeyId("key_test"), scopes=frozenset({Scope.ADMIN}))


class Answer:
    """What the function gave, as the gateway passes it on."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self.raw = raw
        self.status: int = raw["statusCode"]
        self.headers: dict[str, str] = raw.get("headers", {})
        body = raw.get("body", "")
        self.body = base64.b64decode(body) if raw["isBase64Encoded"] else body.encode()

    def json(self) -> Any:
        import json

        return json.loads(self.body)

    @property
    def code(self) -> str:
        return str(self.json()["error"]["code"])


class Context:
    """Lambda's own, as far as it is used."""

    def get_remaining_time_in_millis(self) -> int:
        return 30_000


def event(
    method: str,
    path: str,
    *,
    body: bytes | None = None,
    query: dict[str, str] | None = None,
    headers: dict[str, str] | None = None,
    encoded: bool = False,
) -> dict[str, Any]:
    """An event of payload format 2.0. An HTTP API hands the path on decoded; `encoded` leaves it as it came."""
    given = {"host": "abc.execute-api.example.com", "x-forwarded-proto": "https", **(headers or {})}
    if body is not None:
        given.setdefault("content-type", "application/json")
        given["content-length"] = str(len(body))
    text = body is not None and given["content-type"].startswith(("application/json", "text/"))
    told = path if encoded else unquote(path)
    made: dict[str, Any] = {
        "version": "2.0",
        "routeKey": "$default",
        "rawPath": told,
        "rawQueryString": urlencode(query or {}),
        "headers": given,
        "requestContext": {
            "http": {"method": method, "path": told, "protocol": "HTTP/1.1", "sourceIp": "192.0.2.1"},
            "stage": "$default",
            "timeEpoch": int(time.time() * 1000),
        },
        "isBase64Encoded": body is not None and not text,
    }
    if body is not None:
        made["body"] = body.decode() if text else base64.b64encode(body).decode()
    return made


class Elsewhere:
    """A loop in a thread of its own: what goes on while the function is frozen."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Awaitable[T]) -> T:
        async def it() -> T:
            return await work

        return asyncio.run_coroutine_threadsafe(it(), self.loop).result(30)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(30)
        self.loop.close()


class World:
    """State, a function over it, and a host whose data plane is a scripted agent."""

    def __init__(self, store: Store | None = None) -> None:
        self.store = store or FakeStore()
        self.blobs = FakeBlobs()
        self.agents = FakeAgents()
        self.capacity = FakeCapacity(SystemClock())
        self.elsewhere = Elsewhere()
        self.agent = ScriptedAgent()
        self.key = ""
        self.aws = AwsSettings(table="t", bucket="b")
        self.settings = ProvisionerSettings(
            pools=(PoolSettings(max_hosts=3, host_capacity=SHAPE, warm_default=0, warm_max=0),)
        )

    def opening(self, role: str = "api") -> Any:
        """Services of a process, over the fakes."""
        return open_services(
            self.aws,
            self.settings,
            role=role,  # type: ignore[arg-type]
            store=self.store,
            blobs=self.blobs,
            agents=self.agents,
            capacity=self.capacity,
            clients=object(),  # type: ignore[arg-type]
        )

    async def prepare(self) -> None:
        """A key, an image, and the host's data plane."""
        await self.agent.__aenter__()
        async with self.opening("router") as services:
            await services.signer.refresh()
            made = await services.auth.bootstrap()
            assert made is not None
            self.key = made.secret
            data = b"a layer"
            digest = digest_of(data)
            self.blobs.objects[names.layer(digest)] = data
            layer = Layer(digest=digest, diff_id=digest, size_bytes=len(data))
            manifest = ImageManifest(architecture="amd64", layers=[layer])
            await services.images.put(
                WHO, "code", "1", ImagePut(source=LayersSource(manifest=manifest), wait_s=5)
            )

    async def start_host(self) -> str:
        """What the reconciler does; answers the host's join token."""
        async with self.opening("reconciler") as services:
            await services.reconciler._executor._start("default", 1)
        return self.capacity.starts[-1].join_token

    def call(self, method: str, path: str, **about: Any) -> Answer:
        """A request of the key's holder."""
        headers = {"authorization": f"Bearer {self.key}", **about.pop("headers", {})}
        return Answer(lambda_handler.handler(event(method, path, headers=headers, **about), Context()))

    def post(self, path: str, content: Any, **about: Any) -> Answer:
        import json

        return self.call("POST", path, body=json.dumps(content).encode(), **about)

    def host(self) -> FakeHost:
        """A host that has registered, by the function's own route."""
        token = self.elsewhere.run(self.start_host())
        host = self.agents.add(self.capacity.starts[-1].host, capacity=SHAPE)
        host.address = self.agent.address
        answer = self.post(
            "/internal/v1/hosts:register",
            {
                "join_token": token,
                "boot_id": host.boot_id,
                "address": host.address,
                "capacity": SHAPE.model_dump(),
                "substrates": ["container"],
                "version": "test",
            },
        )
        assert answer.status == 200, answer.body
        return host

    def session(self) -> str:
        """A session that runs."""
        answer = self.post("/v1/sessions", {"image": "code:1", "wait_s": 5})
        assert answer.status == 201, answer.body
        return str(answer.json()["id"])


@contextmanager
def function_world(patch: pytest.MonkeyPatch, world: World) -> Iterator[World]:
    """Let `lambda_handler.handler` work on a world."""
    patch.setattr(lambda_handler, "_opening", world.opening)
    patch.setattr(lambda_handler, "_adapter", None)
    patch.setattr("api.logs.configure", lambda **_: None)
    world.elsewhere.run(world.prepare())
    try:
        yield world
    finally:
        adapter = lambda_handler._adapter
        if adapter is not None:
            loop = asyncio.get_event_loop_policy().get_event_loop()
            loop.run_until_complete(adapter.app.close())  # type: ignore[attr-defined]
            loop.close()
            asyncio.set_event_loop(None)
        world.elsewhere.run(world.agent.stop())
        world.elsewhere.close()
