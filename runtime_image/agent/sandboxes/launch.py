"""Making one sandbox: ordered steps, all blocking. `teardown` undoes any prefix of them."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import os
import resource
import select
import socket
import subprocess
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from runtime_image.agent.sandboxes import disks, ocispec, overlay, records, seccomp, syscalls
from runtime_image.agent.sandboxes.identities import Identity
from runtime_image.agent.sandboxes.machinery import Machinery
from runtime_image.agent.sandboxes.model import (
    Limits,
    Sandbox,
    SandboxRuntimeError,
    SandboxSpec,
    StartFailed,
)
from runtime_image.agent.sandboxes.records import Places, Record
from runtime_image.agent.sandboxes.teardown import teardown

_log = logging.getLogger(__name__)

# Two of runc's threads have work at once; more on a large host only cost their start, one costs 10 ms.
_RUNC_PROCESSORS: Final = "2"

START_STEPS: Final = (
    "lease_identity",
    "write_record",
    "create_disk",
    "mount_disk",
    "mount_root",
    "write_bundle",
    "make_socket",
    "run_runc",
    "join_cgroup",
    "hide_root",
    "complete_record",
)


class Launch:
    """One start. Use once."""

    def __init__(self, machinery: Machinery, spec: SandboxSpec, now: datetime) -> None:
        self._machinery = machinery
        self._settings = machinery.settings
        self._spec = spec
        self._places = machinery.places(spec.sandbox_id)
        self._record: Record | None = None
        self._identity: Identity | None = None
        self._now = now
        self._ours: socket.socket | None = None
        self._theirs: socket.socket | None = None
        self._pid = 0

    def run(self) -> Sandbox:
        """Makes the sandbox. Raises StartFailed or NoIdRange with everything undone."""
        step = "none"
        try:
            for step, work in self._steps():
                self._machinery.observe(step)
                work()
        except BaseException as error:
            self._close_descriptors(also_ours=True)
            self._undo()
            if isinstance(error, (OSError, ValueError, KeyError, subprocess.SubprocessError)):
                raise StartFailed(self._spec.sandbox_id, step, str(error)) from error
            raise
        self._close_descriptors(also_ours=False)
        return _sandbox(self._places, self._checked_record(), self._ours)

    def _steps(self) -> tuple[tuple[str, Callable[[], None]], ...]:
        steps = (
            self._lease_identity,
            self._write_record,
            self._create_disk,
            self._mount_disk,
            self._mount_root,
            self._write_bundle,
            self._make_socket,
            self._run_runc,
            self._join_cgroup,
            self._hide_root,
            self._complete_record,
        )
        names = START_STEPS
        return tuple(zip(names, steps, strict=True))

    def _undo(self) -> None:
        try:
            teardown(self._machinery, self._spec.sandbox_id)
        except OSError as error:
            # The first failure is the one to tell; the record stays for `stop` or a sweep to finish.
            _log.error("start.undo_failed", extra={"sandbox_id": self._spec.sandbox_id, "error": str(error)})

    def _lease_identity(self) -> None:
        self._identity = self._machinery.identities.lease(self._spec.sandbox_id)

    def _write_record(self) -> None:
        spec = self._spec
        self._record = Record(
            sandbox_id=spec.sandbox_id,
            id_base=self._leased().id_base,
            disk_class_mib=disks.disk_class(spec.resources.disk_mib),
            limits=spec.resources,
            created_at=self._now,
        )
        self._places.directory.mkdir(mode=0o700)
        records.write(self._places, self._record)

    def _create_disk(self) -> None:
        self._machinery.disk_store.create(self._places.image, self._checked_record().disk_class_mib)

    def _mount_disk(self) -> None:
        self._places.disk.mkdir(mode=0o700)
        disks.mount_disk(self._places.image, self._places.disk)

    def _mount_root(self) -> None:
        self._places.merged.mkdir(mode=0o755)
        self._places.scratch.mkdir(mode=0o700)
        overlay.mount_overlay(
            layers=(self._machinery.skeleton, *self._spec.layers),
            disk=self._places.disk,
            target=self._places.merged,
            scratch=self._places.scratch,
            identity=self._leased() if self._settings.defences.user_namespace else None,
            flags=overlay.ROOT_FLAGS if self._settings.defences.root_mount_flags else 0,
        )

    def _write_bundle(self) -> None:
        settings, spec, identity = self._settings, self._spec, self._leased()
        config = ocispec.build(
            ocispec.Bundle(
                rootfs=self._places.merged,
                argv=settings.guest_argv,
                hostname=spec.hostname,
                env=settings.guest_env,
                limits=spec.resources,
                cgroup_path=f"/{settings.cgroup_name}/{spec.sandbox_id}",
                id_base=identity.id_base,
                userns_path=f"/proc/{os.getpid()}/fd/{identity.userns_fd}",
                netns_path=f"/proc/{os.getpid()}/fd/{identity.netns_fd}",
                guest_dir=settings.guest_dir,
                guest_mount=settings.guest_mount,
                swap_is_counted=self._machinery.layout.counts_swap(),
                seccomp=seccomp.profile(),
                defences=settings.defences,
            )
        )
        self._places.bundle.mkdir(mode=0o700)
        (self._places.bundle / "config.json").write_text(json.dumps(config))

    def _make_socket(self) -> None:
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def _run_runc(self) -> None:
        places = self._places
        if self._theirs is None:
            raise SandboxRuntimeError("no socket was made yet")
        # On the sandbox's own disk, beside the upper: whatever the guest writes there, its disk bounds it.
        console = os.open(
            places.disk / "console.log",
            os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW,
            0o600,
        )
        try:
            runc = subprocess.Popen(
                [*_resource_limits(self._spec.resources), *self._runc_command()],
                stdin=self._theirs.fileno(),
                stdout=console,
                stderr=console,
                env={"PATH": os.environ.get("PATH", os.defpath), "GOMAXPROCS": _RUNC_PROCESSORS},
            )
            status = wait_for(runc, timeout_s=self._settings.start_timeout_s)
        finally:
            os.close(console)
        if status:
            raise OSError(errno.EIO, f"runc ended with {status}: {_runc_complaint(places.runc_log)}")
        self._pid = int(places.pid_file.read_text())

    def _runc_command(self) -> list[str]:
        places = self._places
        options = [
            "--root",
            str(places.runc_state.parent),
            "--log",
            str(places.runc_log),
            "--log-format",
            "json",
        ]
        run = ["run", "--detach", "--bundle", str(places.bundle), "--pid-file", str(places.pid_file)]
        return [self._settings.runc, *options, *run, self._spec.sandbox_id]

    def _join_cgroup(self) -> None:
        self._machinery.cgroup(self._spec.sandbox_id).join_unified(self._pid)

    def _hide_root(self) -> None:
        # The sandbox has its own copy by now; a shorter mount table makes the next start faster.
        syscalls.unmount(str(self._places.merged), syscalls.MNT_DETACH)
        self._places.merged.rmdir()

    def _complete_record(self) -> None:
        started = records.process_started(self._pid)
        if started is None:
            raise OSError(errno.ESRCH, "the guest ended at once")
        self._record = dataclasses.replace(self._checked_record(), pid=self._pid, pid_started=started)
        records.write_running(self._places, pid=self._pid, pid_started=started)

    def _leased(self) -> Identity:
        if self._identity is None:
            raise SandboxRuntimeError("no id range was leased yet")
        return self._identity

    def _checked_record(self) -> Record:
        if self._record is None:
            raise SandboxRuntimeError("no record was written yet")
        return self._record

    def _close_descriptors(self, *, also_ours: bool) -> None:
        if self._theirs is not None:
            self._theirs.close()
        if also_ours and self._ours is not None:
            self._ours.close()
        if self._identity is not None:
            self._identity.close()


def _sandbox(places: Places, record: Record, sock: socket.socket | None) -> Sandbox:
    if record.pid is None:
        raise SandboxRuntimeError(f"sandbox {record.sandbox_id} never ran")
    return Sandbox(
        sandbox_id=record.sandbox_id,
        pid=record.pid,
        sock=sock,
        upper=places.upper,
        merged=Path(f"/proc/{record.pid}/root"),
        disk_class_mib=record.disk_class_mib,
        id_base=record.id_base,
        limits=record.limits,
        created_at=record.created_at,
    )


def adopted(machinery: Machinery, sandbox_id: str) -> Sandbox | None:
    """The sandbox as found on this host, or None when it does not live any more."""
    places = machinery.places(sandbox_id)
    record = records.read(places)
    if record is None or not record.lives():
        return None
    return _sandbox(places, record, None)


def wait_for(process: subprocess.Popen[bytes], *, timeout_s: float) -> int:
    """The exit status of a child; killed, and TimeoutError, when it does not end in time.

    `Popen.wait` with a timeout looks at growing intervals instead, up to 50 ms apart.
    """
    handle = os.pidfd_open(process.pid)
    try:
        poller = select.poll()
        poller.register(handle, select.POLLIN)
        if not poller.poll(timeout_s * 1000):
            process.kill()
            process.wait()
            raise TimeoutError(f"{process.args!r} did not end within {timeout_s} s")
    finally:
        os.close(handle)
    return process.wait()


def _resource_limits(limits: Limits) -> list[str]:
    # Inherited through runc, not set by it: that needs CAP_SYS_RESOURCE over a user namespace that root
    # did not make, which root does not have everywhere.
    open_files = min(limits.open_files, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    return ["prlimit", f"--nofile={open_files}:{open_files}", "--core=0:0"]


def _runc_complaint(log: Path) -> str:
    lines: list[str] = []
    with contextlib.suppress(FileNotFoundError):
        for line in log.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                entry: dict[str, Any] = json.loads(line)
                if entry.get("level") in {"error", "fatal"}:
                    lines.append(str(entry.get("msg")))
    return "; ".join(lines) or "no message"
