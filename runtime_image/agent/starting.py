"""How a sandbox comes up: its layers, its start, its link, and the commands a session wants run first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from runtime_image.agent.clock import Clock
from runtime_image.agent.hosted import Hosted
from runtime_image.agent.layer_store import LayerStore, Stack
from runtime_image.agent.link import GuestLink, LinkError, ProcessSpec, SpawnError
from runtime_image.agent.ports import Connect, RuntimePort
from runtime_image.agent.sandboxes import (
    Limits,
    NoIdRange,
    Sandbox,
    SandboxRuntimeError,
    SandboxSpec,
    StartFailed,
)
from runtime_image.layers import has_directory
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.host import SandboxSource
from shoal.contract.sessions import Resources
from shoal.contract.states import Phase

#: Seconds that one command of `on_start` may take.
ON_START_TIMEOUT_S = 600.0
_ON_START_KEPT_BYTES = 8192


@dataclass(frozen=True, kw_only=True)
class Started:
    """A live sandbox with its link, not yet anybody's."""

    sandbox: Sandbox
    link: GuestLink
    stack: Stack


def limits_of(resources: Resources) -> Limits:
    """The runtime's limits for what a session asks."""
    return Limits(
        cpu_millis=resources.cpu_millis,
        memory_mib=resources.memory_mib,
        disk_mib=resources.disk_mib,
        pids=max(16, resources.pids),
        shm_mib=resources.shm_mib,
    )


def disk_class(runtime: RuntimePort, disk_mib: int) -> int:
    """The size a disk of `disk_mib` really has, MiB.

    Raises:
        ShoalError: `host_refused`: no class is that large.
    """
    for size in runtime.disk_classes:
        if size >= disk_mib:
            return size
    largest = runtime.disk_classes[-1]
    raise ShoalError(
        ErrorCode.HOST_REFUSED,
        f"This host's largest disk is {largest} MiB.",
        details={"short_of": "disk_mib", "asked": disk_mib, "left": largest},
    )


def start_failed(phase: Phase, message: str, **details: object) -> ShoalError:
    """A sandbox did not start; `phase` tells where."""
    return ShoalError(ErrorCode.SANDBOX_START_FAILED, message, details={"phase": phase.value, **details})


class Starter:
    """Starts sandboxes cold. Bounded by its own semaphore, so that a burst of starts does not slow each of them."""

    def __init__(
        self, *, runtime: RuntimePort, layers: LayerStore, connect: Connect, clock: Clock, concurrency: int
    ) -> None:
        self._runtime = runtime
        self._layers = layers
        self._connect = connect
        self._clock = clock
        self._slots = asyncio.Semaphore(concurrency)
        #: Cold starts of sessions that wait or run; the warm pool stands back while there are any.
        self.claims = 0

    def release(self, stack: Stack) -> None:
        """A sandbox stands on these layers no more."""
        self._layers.release(stack)

    async def cold(
        self,
        sandbox_id: str,
        source: SandboxSource,
        limits: Limits,
        timings_ms: dict[str, float],
        fetched: Callable[[], None] = lambda: None,
    ) -> Started:
        """Fetch the layers, start a sandbox on them and greet its guest. Failed or cancelled, nothing is left.

        `fetched` is called when the layers are there, `timings_ms` gets how long each part took.

        Raises:
            ShoalError: `image_pull_failed`, `sandbox_start_failed`, or `host_refused` when no id range is free.
        """
        began = self._clock.monotonic()
        stack = await self._layers.acquire(source.layers)
        timings_ms["fetching_image"] = round((self._clock.monotonic() - began) * 1000, 3)
        fetched()
        try:
            async with self._slots:
                began = self._clock.monotonic()
                sandbox = await self._start(sandbox_id, stack, limits)
                timings_ms["runtime"] = round((self._clock.monotonic() - began) * 1000, 3)
            try:
                link = await self._greet(sandbox)
            except BaseException:
                await asyncio.shield(self._runtime.stop(sandbox_id))
                raise
            timings_ms["starting_sandbox"] = round((self._clock.monotonic() - began) * 1000, 3)
        except BaseException:
            self._layers.release(stack)
            raise
        return Started(sandbox=sandbox, link=link, stack=stack)

    async def _start(self, sandbox_id: str, stack: Stack, limits: Limits) -> Sandbox:
        spec = SandboxSpec(sandbox_id=sandbox_id, layers=stack.paths, resources=limits)
        try:
            return await self._runtime.start(spec)
        except NoIdRange as error:
            raise ShoalError(
                ErrorCode.HOST_REFUSED, "This host has no id range left.", details={"short_of": "sandboxes"}
            ) from error
        except StartFailed as error:
            raise start_failed(
                Phase.STARTING_SANDBOX, f"The sandbox did not start at {error.step}.", step=error.step
            ) from error
        except (SandboxRuntimeError, OSError) as error:
            raise start_failed(Phase.STARTING_SANDBOX, "The sandbox did not start.") from error

    async def _greet(self, sandbox: Sandbox) -> GuestLink:
        if sandbox.sock is None:
            raise start_failed(Phase.STARTING_SANDBOX, "The sandbox has no link.")
        try:
            return await self._connect(sandbox.sock)
        except (LinkError, OSError) as error:
            raise start_failed(Phase.STARTING_SANDBOX, "The sandbox's guest did not answer.") from error


async def prepare_workdir(link: GuestLink, stack: Stack, workdir: str, user: str | None) -> None:
    """Make the working directory, owned by who works in it (None: root), where the disk has none.

    One that cannot be made is left to the first action, which says why. Most images have theirs, which is seen
    in the layers: the guest is spared a process.
    """
    if has_directory(stack.paths, workdir):
        return
    await link.file_op({"op": "mkdir", "path": workdir, "parents": True, "owner": user})


async def run_on_start(hosted: Hosted, link: GuestLink, runtime: RuntimePort) -> None:
    """Run the session's `on_start` commands, in order.

    Raises:
        ShoalError: `sandbox_start_failed`: one did not end with 0; details tell which, and the end of what it printed.
    """
    assert hosted.sandbox is not None
    for n, command in enumerate(hosted.spec.on_start):
        group = runtime.kill_group(hosted.sandbox, f"on_start{n}")
        name = f"on_start{n}"
        try:
            spec = ProcessSpec(
                process_id=name,
                command=command,
                cwd=hosted.workdir,
                env=hosted.env,
                user=hosted.user,
                output_limit_bytes=_ON_START_KEPT_BYTES,
            )
            process = await link.spawn(spec, procs_fd=group.procs_fd)
            async with asyncio.timeout(ON_START_TIMEOUT_S):
                exit = await process.wait()
        except SpawnError as error:
            raise start_failed(
                Phase.ON_START, f"on_start[{n}] could not be run: {error.message}", index=n
            ) from error
        except TimeoutError as error:
            group.kill()
            raise start_failed(
                Phase.ON_START, f"on_start[{n}] took longer than {ON_START_TIMEOUT_S:.0f} s.", index=n
            ) from error
        except LinkError as error:
            raise start_failed(Phase.ON_START, "The sandbox went away during on_start.", index=n) from error
        finally:
            group.remove()
        if exit.exit_code != 0:
            printed = b"".join(process.stderr.kept()) or b"".join(process.stdout.kept())
            raise start_failed(
                Phase.ON_START,
                f"on_start[{n}] ended with {exit.exit_code if exit.exit_code is not None else exit.signal}.",
                index=n,
                exit_code=exit.exit_code,
                signal=exit.signal,
                output=printed[-2000:].decode("utf-8", "replace"),
            )
        await link.forget(name)
