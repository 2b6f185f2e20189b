"""The AWS emulators that tests run against, each a process of its own for one pytest session.

`ministack` and `moto` are session fixtures that give a URL at 127.0.0.1. State is shared by the session: a test takes
table and bucket names of its own (`fresh_name`). `scripts/emulators` installs both. Where one is not installed the test
is skipped, but fails in CI (`CI=true`).

moto loses updates under concurrency: never use it for races or transactions of DynamoDB.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from provisioner.aws.clients import AwsClients

ROOT = Path(__file__).resolve().parents[1]
REGION = "us-east-1"
CREDENTIALS = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
_READY_S = 60.0
_STOP_S = 10.0
_PR_SET_PDEATHSIG = 1


def fresh_name(prefix: str = "t") -> str:
    """A name for a table or a bucket that no other test has."""
    return f"{prefix}-{uuid.uuid4().hex[:16]}"


def aws_clients(url: str) -> AwsClients:
    """Clients of an emulator; the caller closes them."""
    return AwsClients(region=REGION, endpoint=url, credentials=CREDENTIALS)


def aws_environment(url: str) -> dict[str, str]:
    """The SDK's own variables for a program under test."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_REGION": REGION,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_ACCESS_KEY_ID": CREDENTIALS["aws_access_key_id"],
        "AWS_SECRET_ACCESS_KEY": CREDENTIALS["aws_secret_access_key"],
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def is_installed(name: str) -> bool:
    """Whether `scripts/emulators` has made this emulator's environment."""
    return (ROOT / f".venv-{name}" / "bin" / "python").exists()


@contextmanager
def emulator(name: str, **environment: str) -> Iterator[str]:
    """Run `ministack` or `moto` at a free port of 127.0.0.1 and give its URL; it ends with the block, or with us.

    Args:
        environment: Further variables of its process.

    Raises:
        RuntimeError: It did not start; the message ends with its log.
    """
    with tempfile.TemporaryDirectory(prefix=f"shoal-{name}-") as directory:
        port = _free_port()
        url = f"http://127.0.0.1:{port}"
        log = Path(directory) / "log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                _command(name, port),
                cwd=directory,
                env={**_environment(name, port, directory), **environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                preexec_fn=_end_with_parent,
            )
        try:
            _wait_until_ready(process, url + _HEALTH[name], log)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


_HEALTH = {"ministack": "/_ministack/health", "moto": "/moto-api/data.json"}


def _command(name: str, port: int) -> list[str]:
    python = str(ROOT / f".venv-{name}" / "bin" / "python")
    if name == "moto":
        return [python, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    return [python, "-m", "ministack"]


def _environment(name: str, port: int, directory: str) -> dict[str, str]:
    # Nothing of the caller's AWS settings, no state of an earlier run, no Docker, no listeners beside the one port.
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "MINISTACK_"))}
    kept |= {"TMPDIR": directory, "HOME": directory, "AWS_EC2_METADATA_DISABLED": "true"}
    if name == "ministack":
        kept |= {
            "GATEWAY_PORT": str(port),
            "BIND_HOST": "127.0.0.1",
            "PERSIST_STATE": "0",
            "STATE_DIR": f"{directory}/state",
            "S3_DATA_DIR": f"{directory}/s3",
            "SFTP_ENABLED": "0",
            "IOT_MTLS_ENABLED": "0",
            "LOG_LEVEL": "WARNING",
            "DOCKER_HOST": f"unix://{directory}/no-docker.sock",
        }
    return kept


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + _READY_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    raise RuntimeError(f"the emulator did not start (exit {process.poll()}):\n{log.read_text()[-4000:]}")


def _fixture(name: str) -> Iterator[str]:
    if not is_installed(name):
        message = f"{name} is not installed: run scripts/emulators"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    with emulator(name) as url:
        yield url


@pytest.fixture(scope="session")
def ministack() -> Iterator[str]:
    """The URL of MiniStack: DynamoDB, S3, Lambda, ECS and more."""
    yield from _fixture("ministack")


@pytest.fixture(scope="session")
def moto() -> Iterator[str]:
    """The URL of a moto server: what MiniStack lacks of Auto Scaling and ECS."""
    yield from _fixture("moto")
