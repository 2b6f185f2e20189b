"""Taking one sandbox away, from any state: ordered steps, all blocking, repeatable.

Nothing in memory is needed: what belongs to a sandbox follows from its id. A step finds nothing to do
where its part was never made or is gone already.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from runtime_image.agent.sandboxes import disks, records, syscalls
from runtime_image.agent.sandboxes.cgroups import SandboxCgroup
from runtime_image.agent.sandboxes.machinery import Machinery
from runtime_image.agent.sandboxes.records import Places, Record

_EMPTY_TIMEOUT_S: Final = 10.0
_REMOVE_TIMEOUT_S: Final = 5.0

TEARDOWN_STEPS: Final = (
    "kill",
    "unmount_root",
    "unmount_disk",
    "remove_cgroup",
    "remove_runc_state",
    "remove_files",
    "release_ids",
)


def teardown(machinery: Machinery, sandbox_id: str) -> None:
    """Removes everything of a sandbox; nothing when nothing is there.

    Raises what a step raised; the rest stays for the next call, and the id range stays leased.
    """
    places = machinery.places(sandbox_id)
    cgroup = machinery.cgroup(sandbox_id)
    record = records.read(places)
    steps: tuple[Callable[[], None], ...] = (
        lambda: _kill(cgroup, record),
        lambda: _unmount(places.merged),
        lambda: _unmount_disk(places),
        lambda: cgroup.remove(timeout_s=_REMOVE_TIMEOUT_S),
        lambda: _remove_tree(places.runc_state),
        lambda: _remove_files(places),
        lambda: machinery.identities.release(sandbox_id),
    )
    for name, step in zip(TEARDOWN_STEPS, steps, strict=True):
        machinery.observe(name)
        step()


def _kill(cgroup: SandboxCgroup, record: Record | None) -> None:
    cgroup.kill()
    deadline = time.monotonic() + _EMPTY_TIMEOUT_S
    # A process that was still on its way in (runc was interrupted) is in some hierarchies only.
    while strays := cgroup.stray_pids() | (
        {record.pid} if record and record.pid and record.lives() else set()
    ):
        for pid in strays:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {sorted(strays)} do not die")
        _await_exit(strays, timeout_s=0.05)
    cgroup.wait_empty(timeout_s=_EMPTY_TIMEOUT_S)


def _await_exit(pids: set[int], *, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            poller = select.poll()
            poller.register(handle, select.POLLIN)
            poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
        finally:
            os.close(handle)


def _unmount(target: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        while True:
            try:
                syscalls.unmount(str(target), syscalls.MNT_DETACH)
            except OSError as error:
                if error.errno == errno.EINVAL:  # not (or no longer) a mount point
                    break
                raise
        target.rmdir()


def _unmount_disk(places: Places) -> None:
    if os.path.ismount(places.disk):
        disks.abandon_disk(places.disk)
    for number in records.sandbox_ids(places.scratch):
        _unmount(places.scratch / number)
    _unmount(places.disk)


def _remove_files(places: Places) -> None:
    # Big first, record last: a teardown that is interrupted here is found and repeated.
    places.image.unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        for entry in list(os.scandir(places.directory)):
            if entry.name != places.record.name:
                if entry.is_dir(follow_symlinks=False):
                    _remove_tree(Path(entry.path))
                else:
                    os.unlink(entry.path)
        places.record.unlink(missing_ok=True)
        places.directory.rmdir()


def _remove_tree(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)
