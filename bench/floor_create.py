"""The floor of creation: `runc run` and `runc delete` of the bundle that our own runtime makes.

The bundle is a real one (user namespace, overlay on a loop image, seccomp, limits), mounted once before the clock
starts: the floor pays for runc and the kernel alone. Our creation also pays for the disk, the mounts, the guest, the
control plane and a first result.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import subprocess
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from runtime_image.agent.guest_runtime import build_guest_runtime
from runtime_image.agent.sandboxes import Limits, RuntimeSettings, SandboxRuntime, SandboxSpec
from runtime_image.agent.sandboxes.launch import Launch

_BEFORE_RUNC = ("lease_identity", "write_record", "create_disk", "mount_disk", "mount_root", "write_bundle")


async def floor_create_ms(layers: tuple[Path, ...], samples: int) -> list[float]:
    """Milliseconds of `runc run --detach` of /bin/true plus `runc delete`, `samples` times."""
    with tempfile.TemporaryDirectory(prefix="shoal-bench-floor-") as root:
        home = Path(root)
        settings = RuntimeSettings(
            home=home / "runtime",
            guest_dir=build_guest_runtime(home / "guest"),
            cgroup_name=home.name,
        )
        async with SandboxRuntime(settings) as runtime:
            spec = SandboxSpec(
                sandbox_id="floor", layers=layers, resources=Limits(memory_mib=128, disk_mib=256)
            )
            launch = Launch(runtime._ready(), spec, datetime.now(UTC))
            try:
                for name, step in launch._steps():
                    if name in _BEFORE_RUNC:
                        step()
                return await asyncio.to_thread(_run_and_delete, launch._places.bundle, home / "runc", samples)
            finally:
                await runtime.stop("floor")
                launch._close_descriptors(also_ours=True)


def _run_and_delete(bundle: Path, state: Path, samples: int) -> list[float]:
    config = json.loads((bundle / "config.json").read_text())
    config["process"]["args"] = ["/bin/true"]
    (bundle / "config.json").write_text(json.dumps(config))
    runc = ["runc", "--root", str(state)]
    durations = []
    for number in range(samples):
        name = f"floor-{number}"
        pid_file = state.with_suffix(f".{number}")
        begun = time.perf_counter()
        subprocess.run(
            [*runc, "run", "--detach", "--pid-file", str(pid_file), "--bundle", str(bundle), name],
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        # Without --force: that waits in steps of 100 ms for a process that lives, and would be no floor.
        _wait_for_end(int(pid_file.read_text()))
        subprocess.run([*runc, "delete", name], check=True)
        durations.append((time.perf_counter() - begun) * 1000)
    return durations


def _wait_for_end(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        select.select([descriptor], [], [])
    finally:
        os.close(descriptor)
