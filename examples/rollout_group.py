"""A rollout group: agents that each repair the same library, every one in its own fork of one prepared session.

The agents here are scripted, in place of a model: what they do next follows from what they observe.
`make demo` runs it on a server of its own; for one that is up already, register the library's image first:

    shoal image add toolz-source:1.2.0 ~/.cache/shoal/images/demo-workspace
    shoal image add toolz:1.2.0 ~/.cache/shoal/images/code --workspace toolz-source:1.2.0 --workdir /workspace
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass, field

from shoal import AsyncShoal
from shoal.client import AsyncSession

TESTS = "python3 -m pytest -q --no-header -p no:cacheprovider toolz/tests/test_dicttoolz.py"

FORK_BOMB = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""

#: Agents that misbehave before they work: how a model's mistakes look from outside.
MISHAPS = {
    0: ("hangs", "sleep 1000", 1.5),
    1: ("floods its output", "yes 'the same line again'", 1.5),
    2: ("eats its memory", "python3 -c 'x = [bytes(1 << 20) for _ in range(1 << 20)]'", 30.0),
    3: ("forks without end", "python3 -c '" + FORK_BOMB + "'", 1.5),
}


@dataclass
class Rollout:
    """What one agent did: its result, why, and how long each step took."""

    number: int
    solved: bool = False
    causes: list[str] = field(default_factory=list)
    steps: int = 0
    exec_s: list[float] = field(default_factory=list)


async def play(box: AsyncSession, number: int) -> Rollout:
    """One agent's loop: run the tests, read, search, edit, until they are green or its turns are used up."""
    rollout = Rollout(number)

    async def run(command: str, timeout_s: float = 60.0):
        begun = time.monotonic()
        observed = await box.exec(command, timeout_s=timeout_s)
        rollout.exec_s.append(time.monotonic() - begun)
        rollout.steps += 1
        return observed

    if number in MISHAPS:
        what, command, timeout_s = MISHAPS[number]
        seen = await run(command, timeout_s)
        how = "oom-killed" if seen.oom_killed else "timed out" if seen.timed_out else f"exit {seen.exit_code}"
        dropped = (
            f", {seen.stdout_bytes:,} bytes printed, {len(seen.stdout):,} kept" if seen.truncated else ""
        )
        rollout.causes.append(f"{what}: {how}{dropped}")

    old, new = "inner[k] = dtmp", "inner[k] = inner = dtmp"  # the first try has a typo, as a model's might
    for _ in range(6):
        tests = await run(TESTS)
        if tests.exit_code == 0:
            rollout.solved = True
            rollout.causes.append(tests.stdout.strip().splitlines()[-1])
            break
        failing = re.search(r"^FAILED \S+::(\w+)", tests.stdout, re.MULTILINE)
        word = failing.group(1).removeprefix("test_") if failing else "assoc_in"
        found = await box.search(rf"^def {word}\b", "toolz", glob="*.py")
        path = found.matches[0].path if found.matches else "toolz/dicttoolz.py"
        edited = await box.edit(path, old=old, new=new)
        rollout.steps += 2
        if not edited.replacements:  # the observation says which lines come near: correct ourselves
            near = next((line.text.strip() for line in edited.near if "inner[k]" in line.text), old)
            old, new = near, near.replace("inner[k] = ", "inner[k] = inner = ")
    if not rollout.solved:
        rollout.causes.append("turns used up")
    return rollout


async def played(box: AsyncSession, number: int) -> Rollout:
    """Play, then end the session at once: on a full machine the group's queued ones take its place."""
    async with box:
        return await play(box, number)


async def main(image: str = "toolz:1.2.0", count: int = 32) -> list[Rollout]:
    """Prepare one session, fork it `count` times (half of them warm beforehand), let an agent play in each."""
    async with AsyncShoal() as shoal:
        async with shoal.session(image, run="demo", name="prepared") as box:
            await box.exec("python3 -m compileall -q toolz")
            snapshot = await box.snapshot()
        asked = {"cpu_millis": 1000, "memory_mib": 256, "pids": 64, "disk_mib": 256}
        prepared = await shoal.pools.prepare(
            sandboxes=count // 2, snapshot=snapshot, resources=asked, run="demo"
        )
        try:
            async with await shoal.sessions(
                snapshot=snapshot, count=count, run="demo", resources=asked
            ) as group:
                return await asyncio.gather(*(played(box, number) for number, box in enumerate(group)))
        finally:  # else as many are kept warm until it expires, and the next group has to do with the rest
            await shoal.pools.release(prepared.id)


if __name__ == "__main__":
    for rollout in asyncio.run(main()):
        print(rollout.number, "solved" if rollout.solved else "failed", "; ".join(rollout.causes))
