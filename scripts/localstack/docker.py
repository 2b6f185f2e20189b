"""The Docker daemon's client, as far as the profile needs it: its command line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

INSTANCE_LABEL = "shoal.instance"
TASK_LABEL = "shoal.task"


class DockerError(Exception):
    """The daemon refused; the message is what it said."""


def client_program() -> str:
    """Debian's own client where it is: it has BuildKit built in, a newer one needs its buildx plugin."""
    debian = Path("/usr/bin/docker")
    found = str(debian) if debian.exists() else shutil.which("docker")
    if found is None:
        raise DockerError("docker is missing: apt-get install docker.io")
    return found


class Docker:
    """One daemon.

    Args:
        host: As `DOCKER_HOST` has it.
    """

    def __init__(self, host: str) -> None:
        self._command = [client_program(), "--host", host]

    def run(self, options: Sequence[str], image: str, environment: Mapping[str, str]) -> str:
        """Start a container; its id. Variables are handed over by name: command lines are for all to see."""
        names = [part for name in environment for part in ("--env", name)]
        return self._call(["run", "--detach", *options, *names, image], {**os.environ, **environment})

    def once(self, options: Sequence[str], image: str, command: Sequence[str]) -> str:
        """Run a command in a container of its own; what it printed."""
        return self._call(["run", "--rm", *options, image, *command])

    def containers(self) -> list[dict[str, Any]]:
        """All of the profile's, ended ones too, as `docker inspect` tells them."""
        ids = self._call(
            ["ps", "--all", "--quiet", "--no-trunc", "--filter", f"label={INSTANCE_LABEL}"]
        ).split()
        if not ids:
            return []
        try:
            told: list[dict[str, Any]] = json.loads(self._call(["inspect", *ids]))
        except DockerError:
            return self.containers()  # one went in between
        return told

    def stop(self, container: str, *, grace_s: int) -> None:
        """SIGTERM, then SIGKILL."""
        self._quietly(["stop", "--time", str(grace_s), container])

    def kill(self, container: str) -> None:
        """SIGKILL, as when a machine dies."""
        self._quietly(["kill", container])

    def remove(self, container: str) -> None:
        """Kill and forget it."""
        self._quietly(["rm", "--force", "--volumes", container])

    def logs(self, container: str, *, lines: int = 40) -> str:
        """The end of what it printed, both streams."""
        done = subprocess.run(
            [*self._command, "logs", "--tail", str(lines), container],
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout + done.stderr

    def _quietly(self, arguments: Sequence[str]) -> None:
        try:
            self._call(arguments)
        except DockerError as error:
            if "No such container" not in str(error) and "is not running" not in str(error):
                raise

    def _call(self, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
        done = subprocess.run(
            [*self._command, *arguments], capture_output=True, text=True, env=environment, check=False
        )
        if done.returncode:
            raise DockerError(f"docker {arguments[0]}: {done.stderr.strip()}")
        return done.stdout.strip()
