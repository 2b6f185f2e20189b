"""The profile's processes: each started once, found again by a file that names it, ended by that name alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from provisioner.capacity.processes import ProcessName, boot_id, is_alive, name_of, send, spawn
from scripts.localstack.places import ROOT, Places

_READY_S = 90.0
_STOP_S = 60.0
_POLL_S = 0.1


class DaemonError(Exception):
    """One did not start or did not end; the message ends with its log."""


class Daemons:
    """Those of one installation."""

    def __init__(self, places: Places) -> None:
        self._places = places

    def start(
        self,
        name: str,
        argv: Sequence[str],
        environment: Mapping[str, str],
        ready: Callable[[], bool],
        cwd: Path,
    ) -> None:
        """Start it, unless it runs, and wait until it serves.

        Raises:
            DaemonError: It ended, or does not serve in time.
        """
        process = self.running(name)
        if process is None:
            cwd.mkdir(parents=True, exist_ok=True)
            self._places.run.mkdir(parents=True, exist_ok=True)
            self._places.logs.mkdir(parents=True, exist_ok=True)
            here = os.getcwd()
            os.chdir(cwd)  # posix_spawn knows no directory
            try:
                pid = spawn(argv, environment, self.log(name))
            finally:
                os.chdir(here)
            process = name_of(pid)
            if process is None:
                raise self._failed(name, "ended at once")
            self._file(name).write_text(json.dumps(asdict(process)))
        deadline = time.monotonic() + _READY_S
        while not ready():
            if not is_alive(process):
                raise self._failed(name, "ended")
            if time.monotonic() > deadline:
                raise self._failed(name, f"does not serve after {_READY_S:.0f} s")
            time.sleep(_POLL_S)

    def stop(self, name: str) -> None:
        """SIGTERM, then SIGKILL, then whatever it started and left; returns when all is gone. Harmless when it does
        not run."""
        process = self._known(name)
        if process is not None:
            left = [process]
            for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGKILL):
                for each in left:
                    send(each, number)
                self._gone(left)
                left = _session(process)
                if not left:
                    break
            else:
                raise self._failed(name, f"does not end: {left}")
        self._file(name).unlink(missing_ok=True)

    @staticmethod
    def _gone(processes: Sequence[ProcessName]) -> None:
        deadline = time.monotonic() + _STOP_S
        while any(is_alive(each) for each in processes) and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def running(self, name: str) -> ProcessName | None:
        """The process, if it still runs."""
        process = self._known(name)
        return process if process is not None and is_alive(process) else None

    def log(self, name: str) -> Path:
        """What it prints."""
        return self._places.logs / f"{name}.log"

    def _known(self, name: str) -> ProcessName | None:
        """The process that was started last, if that was in this boot."""
        try:
            process = ProcessName(**json.loads(self._file(name).read_text()))
        except (OSError, ValueError, TypeError):
            return None
        return process if process.boot == boot_id() else None

    def _file(self, name: str) -> Path:
        return self._places.run / f"{name}.json"

    def _failed(self, name: str, how: str) -> DaemonError:
        try:
            said = self.log(name).read_text(errors="replace")[-3000:]
        except OSError:
            said = ""
        return DaemonError(f"{name} {how}:\n{said}")


def _session(leader: ProcessName) -> list[ProcessName]:
    """What still runs of the session that a process led: a session's id is not given anew while one of it lives."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == leader.pid and int(fields[19]) >= leader.started:
                process = name_of(int(entry.name))
                if process is not None:
                    found.append(process)
    return found


def stop_dockerd(daemons: Daemons, places: Places) -> None:
    """End it, and unmount what it leaves mounted."""
    daemons.stop("dockerd")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        target = line.split()[4]
        if target.startswith((f"{places.state}/docker/", f"{places.cache}/docker")):
            subprocess.run(["umount", target], check=False)


def start_dockerd(daemons: Daemons, places: Places) -> None:
    """A Docker daemon of the profile's own. It knows no network but the machine's: containers use loopback."""
    places.cache.mkdir(parents=True, exist_ok=True)
    config = places.state / "dockerd.json"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text("{}")
    socket = places.docker_host.removeprefix("unix://")
    argv = [
        "dockerd", "--config-file", str(config), "--host", places.docker_host,
        "--data-root", str(places.cache / "docker"), "--exec-root", str(places.state / "docker"),
        "--pidfile", str(places.state / "dockerd.pid"),
        # Where the machine has a containerd of its own, it is used: under names that nobody else has.
        "--containerd-namespace=shoal", "--containerd-plugins-namespace=shoal-plugins",
        "--bridge=none", "--iptables=false", "--ip6tables=false",
    ]  # fmt: skip
    daemons.start("dockerd", argv, dict(os.environ), lambda: _docker_serves(socket), places.state)


def start_ministack(daemons: Daemons, places: Places) -> None:
    """MiniStack: DynamoDB, S3, Lambda, HTTP APIs, events. Functions inherit its environment."""
    home = places.state / "ministack"
    environment = {
        **_neutral(places, home),
        **places.environment(),
        "GATEWAY_PORT": str(places.ministack_port),
        "BIND_HOST": "127.0.0.1",
        "PERSIST_STATE": "0",
        "STATE_DIR": str(home / "state"),
        "S3_DATA_DIR": str(home / "s3"),
        "SFTP_ENABLED": "0",
        "IOT_MTLS_ENABLED": "0",
        "LOG_LEVEL": "INFO",
        # A cold start takes seconds on a small machine; functions that were used stay.
        "LAMBDA_WARM_TTL_SECONDS": "1800",
        # Functions run on MiniStack's own interpreter, where its packages come first, its newer SDK among them. Their
        # working directory is their code: so their own packages come first.
        "PYTHONPATH": ".",
        # Functions are processes, tasks are the machines' (machines.py): MiniStack itself needs no Docker.
        "DOCKER_HOST": f"unix://{home}/no-docker.sock",
    }
    argv = [str(ROOT / ".venv-ministack" / "bin" / "python"), "-m", "ministack"]
    url = f"{places.ministack}/_ministack/health"
    daemons.start("ministack", argv, environment, lambda: _answers(url), home)


def start_moto(daemons: Daemons, places: Places) -> None:
    """A moto server: ECS with container instances, Auto Scaling with protection, EC2."""
    home = places.state / "moto"
    python = str(ROOT / ".venv-moto" / "bin" / "python")
    argv = [
        python,
        str(ROOT / "scripts" / "localstack" / "moto_server.py"),
        "-H",
        "127.0.0.1",
        "-p",
        str(places.moto_port),
    ]
    url = f"{places.moto}/moto-api/data.json"
    daemons.start("moto", argv, _neutral(places, home), lambda: _answers(url), home)


def _neutral(places: Places, home: Path) -> dict[str, str]:
    """Nothing of the caller's AWS settings or Python paths."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("AWS_", "MINISTACK_", "SHOAL_", "PYTHON"))
    }
    (home / "tmp").mkdir(parents=True, exist_ok=True)
    return {**kept, "HOME": str(home), "TMPDIR": str(home / "tmp")}


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _docker_serves(socket: str) -> bool:
    import http.client
    import socket as sockets

    connection = http.client.HTTPConnection("localhost", timeout=5)
    try:
        connection.sock = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
        connection.sock.connect(socket)
        connection.request("GET", "/_ping")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
