"""A machine with cgroup v2 alone, as a mount namespace shows it to runc and to us.

On a hybrid machine the controllers for cpu, memory and pids are bound to v1, so the limits themselves are left
out here; their v2 files are tested in the unit tests.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from runtime_image.agent.sandboxes import RuntimeSettings
from runtime_image.agent.sandboxes.cgroups import CgroupLayout

SCRIPT = """
import asyncio, json, os, sys
from pathlib import Path
from runtime_image.agent.link import GuestLink, ProcessSpec
from runtime_image.agent.sandboxes import RuntimeSettings, SandboxRuntime, SandboxSpec, host, ocispec
from runtime_image.agent.sandboxes.cgroups import CgroupLayout

complete = ocispec.build
def without_limits(bundle):
    config = complete(bundle)
    for name in ("cpu", "memory", "pids"):
        del config["linux"]["resources"][name]
    return config
ocispec.build = without_limits
host.keep_room_for_the_host = lambda *_: 0

async def main():
    order = json.loads(sys.argv[1])
    settings = RuntimeSettings(
        home=Path(order["home"]), run_dir=Path(order["run_dir"]), guest_dir=Path(order["guest_dir"]),
        cgroup_name=order["cgroup_name"], id_base=order["id_base"], id_count=4,
    )
    found = {"kind": CgroupLayout.detect().kind}
    async with SandboxRuntime(settings) as runtime:
        box = await runtime.start(SandboxSpec(sandbox_id="box", layers=(Path(order["layer"]),)))
        found["cgroup"] = Path(f"/proc/{box.pid}/cgroup").read_text().splitlines()[-1]
        link = await GuestLink.connect(box.sock, timeout_s=20)
        group = runtime.kill_group(box, "step")
        process = await link.spawn(
            ProcessSpec(process_id="step", command=order["command"]),
            procs_fd=group.procs_fd,
        )
        await process.wait()
        found["said"] = process.stdout.snapshot().data.decode().strip()
        found["refused"] = process.stderr.snapshot().data.decode()
        await runtime.freeze(box)
        await runtime.thaw(box)
        found["alive"] = group.alive()
        group.kill()
        while group.alive():
            await asyncio.sleep(0.01)
        found["removed"] = group.remove()
        link.close()
        await runtime.stop("box")
    found["left"] = os.path.exists(f"/sys/fs/cgroup/{settings.cgroup_name}")
    print(json.dumps(found))

asyncio.run(main())
"""


def test_start_kill_group_freeze_and_stop_on_pure_v2(settings: RuntimeSettings, images: Any) -> None:
    """The same code; runc filters devices by a program instead of the v1 controller."""
    order = {
        "home": str(settings.home), "run_dir": str(settings.run_dir), "guest_dir": str(settings.guest_dir),
        "cgroup_name": settings.cgroup_name, "id_base": settings.id_base, "layer": str(images.busybox),
        "command": "(setsid sleep 1000 &) ; head -c 3 /dev/zero | wc -c; mknod /dev/x c 1 3",
    }  # fmt: skip
    prepare = "umount -R /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup"
    if CgroupLayout.detect().kind == "v2":
        pytest.skip("this machine is pure v2: all other tests are this one")
    private = ["unshare", "--mount", "--propagation", "private", "sh", "-c", f'{prepare} && exec "$@"', "sh"]
    ran = subprocess.run(
        [*private, sys.executable, "-c", SCRIPT, json.dumps(order)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert "not permitted" in found.pop("refused")
    assert found == {
        "kind": "v2",
        "cgroup": f"0::/{settings.cgroup_name}/box",
        "said": "3",
        "alive": True,
        "removed": True,
        "left": False,
    }
