"""A server for the benchmark and the demo: its own temporary home and port, ended with everything of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(os.environ.get("SHOAL_CACHE") or Path.home() / ".cache" / "shoal")


@dataclass(frozen=True, kw_only=True)
class Server:
    """Where it is, what opens it, where it keeps its things."""

    url: str
    api_key: str
    home: Path
    pid: int


@contextmanager
def served(*, warm: int) -> Iterator[Server]:
    """Run `python -m api` until the block is left; `warm` sandboxes are kept of each image in use."""
    root = Path(tempfile.mkdtemp(prefix="shoal-own-"))
    ready, log, credentials = root / "ready.json", root / "server.log", root / "client.json"
    command = [sys.executable, "-m", "api", "up", "--home", str(root / "home"), "--port", "0"]
    command += ["--warm", str(warm), "--max-hosts", "1", "--idle-to-zero-s", "3600"]
    command += ["--credentials", str(credentials), "--ready-file", str(ready), "--log-format", "json"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        while not ready.exists():
            if process.poll() is not None:
                told = log.read_text(errors="replace")[-3000:]
                raise SystemExit(
                    f"{told}\nthe server did not start; `shoal doctor` says what this machine lacks"
                )
            time.sleep(0.05)
        opened = json.loads(credentials.read_text())
        yield Server(url=opened["url"], api_key=opened["api_key"], home=root / "home", pid=process.pid)
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(root, ignore_errors=True)
