"""Nothing is left: failed starts, repeated teardowns, killed agents, many cycles."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runtime_image.agent.sandboxes import (
    RuntimeSettings,
    Sandbox,
    SandboxRuntime,
    SandboxRuntimeError,
    SandboxSpec,
    StartFailed,
    overlay,
)
from runtime_image.agent.sandboxes.launch import START_STEPS
from runtime_image.agent.sandboxes.teardown import TEARDOWN_STEPS


def observed(runtime: SandboxRuntime, broken: str, *, times: int = 1) -> list[str]:
    """Makes a step fail `times` times; the list fills with the steps that were begun."""
    seen: list[str] = []

    def observe(step: str) -> None:
        seen.append(step)
        if step == broken and seen.count(step) <= times:
            raise OSError(5, f"scripted failure of {step}")

    runtime._machinery = dataclasses.replace(runtime._ready(), observe=observe)
    return seen


def state_of(home: Path, left_of: Any) -> dict[str, Any]:
    """What a cycle must leave as it was."""
    return {
        "mounts and loops": left_of(home, "none"),
        "fds": len(os.listdir("/proc/self/fd")),
        "files": sorted(str(path.relative_to(home)) for path in home.rglob("*")),
    }


def key_owners() -> set[int]:
    return {int(line.partition(":")[0]) for line in Path("/proc/key-users").read_text().splitlines()}


def close(sandbox: Sandbox) -> None:
    assert sandbox.sock is not None
    sandbox.sock.close()


@pytest.mark.parametrize("step", START_STEPS)
async def test_a_start_that_fails_at_any_step_leaves_nothing(
    step: str, runtime: SandboxRuntime, images: Any, settings: RuntimeSettings, left_of: Any
) -> None:
    """Everything made before is undone, the error names the step, and the same id starts afterwards."""
    spec = SandboxSpec(sandbox_id="breaks", layers=(images.busybox,))
    close(await runtime.start(spec))
    await runtime.stop("breaks")
    await asyncio.get_running_loop().run_in_executor(None, runtime._ready().identities.refill)
    before = state_of(settings.home, left_of)
    observed(runtime, step)
    with pytest.raises(StartFailed) as failed:
        await runtime.start(spec)
    assert failed.value.step == step
    assert runtime._ready().identities.leased_count() == 0
    after = state_of(settings.home, left_of)
    # A range that failed was taken from those made ahead: two descriptors each.
    assert before.pop("fds") - after.pop("fds") in {0, 2}
    assert after == before
    close(await runtime.start(spec))
    await runtime.stop("breaks")


@pytest.mark.parametrize("step", TEARDOWN_STEPS)
async def test_a_teardown_that_fails_at_any_step_is_finished_by_the_next(
    step: str, runtime: SandboxRuntime, images: Any, settings: RuntimeSettings
) -> None:
    """The id range stays leased until everything that used it is gone; each undo may run twice."""
    spec = SandboxSpec(sandbox_id="resists", layers=(images.busybox,))
    close(await runtime.start(spec))
    seen = observed(runtime, step)
    with pytest.raises(OSError, match="scripted"):
        await runtime.stop("resists")
    assert seen[-1] == step
    assert runtime._ready().identities.leased_count() == 1
    await runtime.stop("resists")
    assert not (settings.home / "sandboxes" / "resists").exists()
    assert runtime._ready().identities.leased_count() == 0
    await runtime.stop("resists")


@pytest.mark.parametrize("step", START_STEPS[2:])
async def test_a_start_that_could_not_be_undone_is_swept(
    step: str, runtime: SandboxRuntime, images: Any, settings: RuntimeSettings
) -> None:
    """The start fails and its first undo fails as well; a later sweep finds and removes the rest."""
    seen: list[str] = []

    def observe(name: str) -> None:
        seen.append(name)
        if name == step or (name == "kill" and seen.count("kill") == 1):
            raise OSError(5, "scripted")

    machinery = runtime._ready()
    runtime._machinery = dataclasses.replace(machinery, observe=observe)
    with pytest.raises(StartFailed):
        await runtime.start(SandboxSpec(sandbox_id="half", layers=(images.busybox,)))
    assert (settings.home / "sandboxes" / "half").exists()
    runtime._machinery = machinery
    assert await runtime.sweep(set()) == ["half"]
    assert machinery.identities.leased_count() == 0


async def test_fifty_cycles_leave_the_machine_as_it_was(
    runtime: SandboxRuntime, images: Any, settings: RuntimeSettings, left_of: Any
) -> None:
    """Mounts, loop devices, descriptors, files, cgroups (the fixture) and processes are equal."""

    async def cycle(number: int) -> None:
        close(await runtime.start(SandboxSpec(sandbox_id=f"c{number}", layers=(images.busybox,))))
        await runtime.stop(f"c{number}")

    async def settle() -> dict[str, Any]:
        await asyncio.get_running_loop().run_in_executor(None, runtime._ready().identities.close)
        return state_of(settings.home, left_of)

    await cycle(0)
    before = await settle()
    runtime._ready().identities._closed = False
    for first in range(0, 50, 5):
        await asyncio.gather(*(cycle(first + n) for n in range(5)))
    assert await settle() == before
    assert runtime._ready().identities.leased_count() == 0
    # The kernel collects the session keyrings a moment later.
    async with asyncio.timeout(30):
        while any(settings.id_base <= owner < settings.id_base + 16 * 65_536 for owner in key_owners()):
            await asyncio.sleep(0.05)


AGENT = """
import asyncio, json, os, sys
from pathlib import Path
from runtime_image.agent.sandboxes import RuntimeSettings, SandboxRuntime, SandboxSpec

async def main():
    order = json.loads(sys.argv[1])
    settings = RuntimeSettings(
        home=Path(order["home"]), run_dir=Path(order["run_dir"]), guest_dir=Path(order["guest_dir"]),
        cgroup_name=order["cgroup_name"], id_base=order["id_base"], id_count=order["id_count"],
        guest_argv=("/bin/sleep", "1000"),
    )
    async with SandboxRuntime(settings) as runtime:
        for name in order["names"]:
            box = await runtime.start(SandboxSpec(sandbox_id=name, layers=(Path(order["layer"]),)))
            print(box.pid, box.id_base, flush=True)
        if order["half"]:
            asyncio.create_task(runtime.start(SandboxSpec(sandbox_id="half", layers=(Path(order["layer"]),))))
            await asyncio.sleep(order["half"])
            os.kill(os.getpid(), 9)
        await asyncio.sleep(1000)

asyncio.run(main())
"""


def start_agent(
    settings: RuntimeSettings, layer: Path, names: list[str], half: float
) -> subprocess.Popen[str]:
    order = {
        "home": str(settings.home), "run_dir": str(settings.run_dir), "guest_dir": str(settings.guest_dir),
        "cgroup_name": settings.cgroup_name, "id_base": settings.id_base, "id_count": settings.id_count,
        "layer": str(layer), "names": names, "half": half,
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-c", AGENT, json.dumps(order)], stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("half", [0.0005, 0.005, 0.015, 0.03, 0.05])
async def test_a_killed_agents_sandboxes_are_adopted_or_swept(
    half: float, settings: RuntimeSettings, left_of: Any, images: Any
) -> None:
    """kill -9 in the middle of a start: what lived is adopted with its record, the half-made one goes."""
    with start_agent(settings, images.busybox, ["one", "two", "dies"], half) as agent:
        assert agent.stdout is not None
        lines = [agent.stdout.readline().split() for _ in range(3)]
        agent.wait(60)
    pids = [int(pid) for pid, _ in lines]
    os.kill(pids[2], 9)
    async with SandboxRuntime(settings) as runtime:
        async with asyncio.timeout(10):
            while len(found := await runtime.adopt()) > 3 or "dies" in {box.sandbox_id for box in found}:
                await asyncio.sleep(0.01)
        kept = {box.sandbox_id: box for box in found}
        assert {"one", "two"} <= set(kept) <= {"one", "two", "half"}
        assert kept["one"].pid == pids[0]
        assert kept["one"].id_base == int(lines[0][1])
        assert kept["one"].sock is None
        assert runtime.usage(kept["one"]).pids == 1
        removed = await runtime.sweep({"one"})
        assert {"two", "dies"} <= set(removed) <= {"two", "dies", "half"}
        assert runtime.alive(kept["one"])
        # The adopted one's range is not given to the next.
        other = await runtime.start(SandboxSpec(sandbox_id="other", layers=(images.busybox,)))
        assert other.id_base != kept["one"].id_base
        close(other)
        await runtime.stop("one")
        await runtime.sweep(set())
    assert not any(dataclasses.astuple(left_of(settings.home, settings.cgroup_name)))


async def test_a_sweep_finds_what_no_record_names(
    settings: RuntimeSettings, images: Any, tmp_path: Path
) -> None:
    """Records lost (a wiped directory): the cgroup, runc's state and the loop device are still found."""
    with start_agent(settings, images.busybox, ["lost"], 0) as agent:
        assert agent.stdout is not None
        pid = int(agent.stdout.readline().split()[0])
        agent.kill()
        agent.wait(60)
    directory = settings.home / "sandboxes" / "lost"
    (directory / "record.json").unlink()
    async with SandboxRuntime(settings) as runtime:
        assert await runtime.adopt() == []
        assert await runtime.sweep(set()) == ["lost"]
    assert not Path(f"/proc/{pid}/cwd").exists()
    assert not directory.exists()


async def test_layers_are_attached_for_a_moment_on_older_kernels(
    runtime: SandboxRuntime,
    images: Any,
    settings: RuntimeSettings,
    monkeypatch: pytest.MonkeyPatch,
    left_of: Any,
) -> None:
    """Before Linux 6.15 overlayfs refuses detached layers; the other way leaves as little behind."""
    real = overlay._mount
    refused: list[Path] = []

    def refuse_once(trees: Any, target: Path, flags: int) -> None:
        if not refused:
            refused.append(target)
            raise OSError(22, "scripted")
        real(trees, target, flags)

    monkeypatch.setattr(overlay, "_mount", refuse_once)
    sandbox = await runtime.start(SandboxSpec(sandbox_id="old", layers=(images.busybox,)))
    assert refused
    assert runtime.alive(sandbox)
    # The disk, and nothing of the layers.
    assert len(left_of(settings.home, "none").mounts) == 1
    close(sandbox)


async def test_starts_and_stops_of_one_id_never_meet(runtime: SandboxRuntime, images: Any) -> None:
    """In whatever order they come, each finds the sandbox whole or absent."""
    spec = SandboxSpec(sandbox_id="busy", layers=(images.busybox,))

    async def start() -> None:
        with contextlib.suppress(SandboxRuntimeError):
            close(await runtime.start(spec))

    for _ in range(3):
        await asyncio.gather(
            start(), runtime.stop("busy"), start(), runtime.stop("busy"), runtime.stop("busy")
        )
    await runtime.stop("busy")
    assert runtime._locks == {}
    assert runtime._ready().identities.leased_count() == 0


async def test_a_cancelled_stop_is_finished_before_anything_else(
    runtime: SandboxRuntime, images: Any
) -> None:
    """The next start of the same id waits for the teardown that goes on in its thread."""
    spec = SandboxSpec(sandbox_id="again", layers=(images.busybox,))
    close(await runtime.start(spec))
    stopping = asyncio.create_task(runtime.stop("again"))
    await asyncio.sleep(0.001)
    stopping.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await stopping
    second = await runtime.start(spec)
    assert runtime.alive(second)
    close(second)


async def test_all_sandboxes_together_leave_the_host_processes(
    runtime: SandboxRuntime, settings: RuntimeSettings
) -> None:
    """The agent's top cgroup is bounded below the machine's limit."""
    layout = runtime._ready().layout
    root = layout.unified if layout.kind == "v2" else layout.controllers["pids"]
    most = int((root / settings.cgroup_name / "pids.max").read_text())
    assert most < int(Path("/proc/sys/kernel/threads-max").read_text())
