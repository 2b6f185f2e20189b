"""A real server on this machine, on a home and a port of its own, ended and looked after when the tests are done."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from shoal.client import AsyncShoal, Shoal
from tests.e2e.leftovers import cgroup_names, leftovers

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "runtime_image" / "images"
READY_S = 60


@dataclass
class Server:
    """A server under test.

    Attributes:
        home: Its state; made by the test, kept over restarts.
        options: Further options of `python -m api`.
        program: What Python runs.
    """

    home: Path
    options: tuple[str, ...] = ()
    url: str = ""
    key: str = ""
    process: subprocess.Popen[bytes] | None = None
    cgroups: frozenset[str] = frozenset()
    environment: dict[str, str] = field(default_factory=dict)
    program: tuple[str, ...] = ("-m", "api")

    @property
    def credentials(self) -> Path:
        """Where it writes URL and key."""
        return self.home.with_name(self.home.name + "-credentials.json")

    @property
    def log(self) -> Path:
        """What it and its hosts wrote on stderr."""
        return self.home.with_name(self.home.name + "-server.log")

    def start(self) -> None:
        """Start it and wait until it serves."""
        ready = self.home.with_name(self.home.name + "-ready.json")
        ready.unlink(missing_ok=True)
        command = [
            sys.executable, *self.program, "up", "--home", str(self.home), "--port", "0",
            "--credentials", str(self.credentials), "--ready-file", str(ready), "--log-format", "json",
            *self.options,
        ]  # fmt: skip
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=log, env={**os.environ, **self.environment}
            )
        deadline = time.monotonic() + READY_S
        while not ready.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the server did not start:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.02)
        self.url = json.loads(ready.read_text())["url"]
        self.key = json.loads(self.credentials.read_text())["api_key"]

    def kill(self) -> None:
        """SIGKILL, as a crash: its hosts go on."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.process = None

    def stop(self) -> None:
        """SIGTERM, and wait for its end.

        Raises:
            AssertionError: It did not end well.
        """
        if self.process is None:
            return
        self.cgroups |= cgroup_names(self.home)
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(90)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the server did not stop:\n{self.log.read_text()[-4000:]}") from None
        finally:
            self.process = None
        assert code == 0, f"exit code {code}:\n{self.log.read_text()[-4000:]}"

    def client(self, **options: Any) -> httpx.Client:
        """A bare HTTP client with the key."""
        headers = {"authorization": f"Bearer {self.key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60, **options)

    def shoal(self) -> Shoal:
        """The SDK."""
        return Shoal(url=self.url, api_key=self.key)

    def async_shoal(self) -> AsyncShoal:
        """The asynchronous SDK."""
        return AsyncShoal(url=self.url, api_key=self.key)


@contextmanager
def a_server(*options: str, program: tuple[str, ...] = ("-m", "api"), **environment: str) -> Iterator[Server]:
    """A server on a temporary home; afterwards nothing of it may be left."""
    base = Path(tempfile.mkdtemp(prefix="shoal-e2e-"))
    server = Server(home=base / "home", options=options, environment=environment, program=program)
    try:
        server.start()
        try:
            yield server
        except BaseException:
            print(server.log.read_text()[-6000:])  # pytest shows it beside the failure
            raise
        server.stop()
        left = leftovers(server.home, server.cgroups)
        assert not left, f"the server left something behind: {left}"
    finally:
        if server.process is not None:
            server.process.kill()
            server.process.wait()
            server.start()  # adopts what the dead one left, so that it can be ended
            server.stop()
        shutil.rmtree(base, ignore_errors=True)


def register(server: Server, name: str) -> None:
    """Make a shipped recipe's image known under `<name>:1`, and wait for it."""
    body = {"source": {"recipe": (RECIPES / f"{name}.toml").read_text()}, "wait_s": 25}
    with server.client() as client:
        deadline = time.monotonic() + 600
        while True:
            response = client.put(f"/v1/images/{name}:1", json=body)
            assert response.status_code in (200, 202), response.text
            image = response.json()
            if image["state"] == "available":
                return
            assert image["state"] == "building", image
            assert time.monotonic() < deadline, image


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """One server for all tests that do not disturb it, with the image `minimal:1`."""
    with a_server() as started:
        register(started, "minimal")
        yield started


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    """A bare HTTP client."""
    with server.client() as opened:
        yield opened


@pytest.fixture
def shoal(server: Server) -> Iterator[Shoal]:
    """The SDK."""
    with server.shoal() as opened:
        yield opened


@pytest.fixture
async def async_shoal(server: Server) -> AsyncIterator[AsyncShoal]:
    """The asynchronous SDK."""
    async with server.async_shoal() as opened:
        yield opened
