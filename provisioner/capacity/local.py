"""Hosts on this machine: each an agent subprocess with a home of its own.

    <root>/<host>/instance.json    what it is: written before its process starts, and again when it runs
    <root>/<host>/agent.log        what it prints
    <root>/<host>/home/            the agent's own

Hosts are not tied to the control plane's process: a start after a kill -9 finds them by these files. Stopping is
SIGTERM, then SIGKILL for all that carries the host's mark, then a command that cleans what was left; the directory
goes last.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import structlog

from provisioner.capacity.port import CapacityUnavailable, HostStart, Instance, NoMoreHosts
from provisioner.capacity.processes import MARK, ProcessName, is_alive, marked, name_of, send, spawn
from provisioner.clock import Clock
from shoal.contract.base import HostId

log = structlog.get_logger("provisioner.capacity")

Command = Callable[[HostStart, Path], Sequence[str]]
Environment = Callable[[HostStart, Path], Mapping[str, str]]
Cleanup = Callable[[HostId, Path], Sequence[str]]

_POLL_S = 0.05
_CLEANUP_S = 120.0


def _inherited(start: HostStart, home: Path) -> Mapping[str, str]:
    return os.environ


class LocalCapacity:
    """The `Capacity` port over subprocesses.

    Args:
        root: Where hosts' directories are; made (0700) when missing.
        command: The command line of a host, given its home.
        environment: Its environment; the host's mark is added. None: this process's own.
        cleanup: A command that removes what a killed host may have left; None where there is none to run.
        max_hosts: More are refused with NoMoreHosts; None leaves that to the pools.
        stop_s: How long a host may take to end by itself.
    """

    def __init__(
        self,
        root: Path,
        *,
        command: Command,
        clock: Clock,
        environment: Environment | None = None,
        cleanup: Cleanup | None = None,
        max_hosts: int | None = None,
        stop_s: float = 60.0,
    ) -> None:
        self._root = root
        self._command = command
        self._clock = clock
        self._environment = environment or _inherited
        self._cleanup = cleanup
        self._max_hosts = max_hosts
        self._stop_s = stop_s
        self._stopping: dict[str, asyncio.Task[None]] = {}
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        root.chmod(0o700)

    async def start(self, starts: Sequence[HostStart]) -> list[Instance]:
        """As the port says."""
        found: list[Instance] = []
        for start in starts:
            there = await asyncio.to_thread(self._read, start.host)
            if there is None:
                count = len(await asyncio.to_thread(self._names))
                if self._max_hosts is not None and count >= self._max_hosts:
                    raise NoMoreHosts(f"This machine runs {count} hosts, its limit.")
                there = await asyncio.to_thread(self._start, start)
            found.append(there)
        return found

    async def stop(self, instances: Sequence[str]) -> None:
        """As the port says; those asked for are ended side by side."""
        tasks = []
        for name in instances:
            task = self._stopping.get(name)
            if task is None:
                task = self._stopping[name] = asyncio.create_task(self._stop(name), name=f"stop host {name}")
            tasks.append(task)
        results = await asyncio.gather(*(asyncio.shield(task) for task in tasks), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def instances(self) -> list[Instance]:
        """As the port says."""
        return await asyncio.to_thread(self._all)

    async def close(self) -> None:
        """As the port says; a stop that was begun is waited for."""
        if self._stopping:
            await asyncio.gather(*self._stopping.values(), return_exceptions=True)

    def home(self, host: str) -> Path:
        """The agent's own directory."""
        return self._root / host / "home"

    def _names(self) -> list[str]:
        return sorted(entry.name for entry in self._root.iterdir() if (entry / "instance.json").exists())

    def _all(self) -> list[Instance]:
        found = [self._read(HostId(name)) for name in self._names()]
        return [instance for instance in found if instance is not None]

    def _start(self, start: HostStart) -> Instance:
        directory = self._root / start.host
        home = self.home(start.host)
        try:
            home.mkdir(parents=True, exist_ok=True, mode=0o700)
            about: dict[str, Any] = {
                "host": start.host,
                "pool": start.pool,
                "started_at": self._clock.now().isoformat(),
                "process": None,
            }
            # First the intent: a process that starts without it could not be found again.
            _write(directory / "instance.json", about)
            environment = {**self._environment(start, home), MARK: start.host}
            pid = spawn(self._command(start, home), environment, directory / "agent.log")
            process = name_of(pid)
            about["process"] = (
                asdict(process) if process is not None else {"pid": pid, "started": 0, "boot": ""}
            )
            _write(directory / "instance.json", about)
        except OSError as error:
            shutil.rmtree(directory, ignore_errors=True)
            raise CapacityUnavailable(f"A host cannot be started here: {error}.") from error
        log.info("host.started", host_id=start.host, pool=start.pool, pid=pid)
        instance = self._read(start.host)
        assert instance is not None
        return instance

    def _read(self, host: HostId) -> Instance | None:
        try:
            about = json.loads((self._root / host / "instance.json").read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise CapacityUnavailable(f"The file of host {host} cannot be read: {error}.") from error
        process = self._process(about)
        alive = process is not None and is_alive(process)
        return Instance(
            id=host,
            host=host,
            pool=about["pool"],
            alive=alive,
            started_at=datetime.fromisoformat(about["started_at"]),
            detail=self._last_words(host, alive=alive),
        )

    def _process(self, about: Mapping[str, Any]) -> ProcessName | None:
        if about["process"] is not None:
            return ProcessName(**about["process"])
        # Whoever started it died in between: its process, if there is one, leads its session.
        for process in marked(about["host"]):
            if os.getsid(process.pid) == process.pid:
                _write(self._root / about["host"] / "instance.json", {**about, "process": asdict(process)})
                return process
        return None

    def _last_words(self, host: str, *, alive: bool) -> str | None:
        """Why an agent has ended, or what it complained of last: one that is started again and again lives on."""
        try:
            with (self._root / host / "agent.log").open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 2000))
                text = file.read().decode(errors="replace")
                lines = [line for line in text.splitlines() if line.strip() and '"level": "info"' not in line]
        except OSError:
            lines = []
        # Why it ended says more than that it did.
        lines = [line for line in lines if not line.startswith("holder: ")] or lines
        said = f"Its last words: {lines[-1][:500]}" if lines else ""
        if alive:
            return said or None
        return f"Its agent has ended. {said}".rstrip()

    async def _stop(self, name: str) -> None:
        try:
            await self._end(name)
        finally:
            del self._stopping[name]

    async def _end(self, name: str) -> None:
        about = await asyncio.to_thread(self._read, HostId(name))
        if about is None:
            return
        began = self._clock.monotonic()
        text = await asyncio.to_thread((self._root / name / "instance.json").read_text)
        process = self._process(json.loads(text))
        if process is not None:
            await asyncio.to_thread(send, process, signal.SIGTERM)
            await self._gone([process], self._stop_s)
        left = await asyncio.to_thread(marked, name)
        killed = len(left)
        while left:
            for each in left:
                await asyncio.to_thread(send, each, signal.SIGKILL)
            await self._gone(left, _CLEANUP_S)
            left = await asyncio.to_thread(marked, name)
        await self._clean(name)
        await asyncio.to_thread(shutil.rmtree, self._root / name)
        log.info(
            "host.stopped",
            host_id=name,
            killed=killed,
            duration_ms=round((self._clock.monotonic() - began) * 1000),
        )

    async def _gone(self, processes: Sequence[ProcessName], seconds: float) -> None:
        """Wait until none of them runs, or the time is over."""
        deadline = self._clock.monotonic() + seconds
        while any(is_alive(process) for process in processes) and self._clock.monotonic() < deadline:
            await self._clock.sleep(_POLL_S)

    async def _clean(self, name: str) -> None:
        """Remove what a host may have left.

        Raises:
            CapacityUnavailable: The command failed; the host's directory stays, and stopping it again tries again.
        """
        if self._cleanup is None:
            return
        argv = self._cleanup(HostId(name), self.home(name))
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            _, said = await asyncio.wait_for(process.communicate(), _CLEANUP_S)
        except TimeoutError as error:
            process.kill()
            await process.wait()
            raise CapacityUnavailable(f"Cleaning up after host {name} takes too long.") from error
        if process.returncode != 0:
            words = said.decode(errors="replace").strip()[-500:]
            raise CapacityUnavailable(f"Cleaning up after host {name} failed: {words}")


def _write(path: Path, about: Mapping[str, Any]) -> None:
    aside = path.with_name(".instance.part")
    aside.write_text(json.dumps(about))
    aside.rename(path)
