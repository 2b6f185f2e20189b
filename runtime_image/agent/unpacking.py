"""`python -m runtime_image.agent.unpacking CACHE DIGEST BLOB`: put one layer into the cache, in a process of its own.

Unpacking is many seconds of Python for a large image; in a thread of the agent it would hold up every action meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from runtime_image.layers import LayerCache, LayerError

#: Layers up to this size, compressed, are unpacked in a thread: a process takes longer to start.
SMALL_BYTES = 4 << 20


def take(source: Path, into: Path) -> None:
    """Let `into` be the blob at `source`, without copying it."""
    try:
        os.link(source, into)
    except OSError:
        into.symlink_to(source)


async def unpack(cache: LayerCache, digest: str, blob: Path, *, size_bytes: int) -> None:
    """Put a layer into the cache, unless it is there.

    Raises:
        LayerError: The blob is not that layer, or not one to use.
        OSError: The machine failed, such as a full disk.
    """
    if size_bytes <= SMALL_BYTES:
        await asyncio.to_thread(cache.ensure, digest, lambda into: take(blob, into))
        return
    argv = [sys.executable, "-m", "runtime_image.agent.unpacking", str(cache.root), digest, str(blob)]
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        _, complaint = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if process.returncode:
        raise LayerError(complaint.decode("utf-8", "replace").strip()[-500:] or f"exit {process.returncode}")


def main(argv: list[str]) -> int:
    """0: the layer is in the cache; 1: it is not, and stderr says why."""
    cache, digest, blob = LayerCache(Path(argv[0])), argv[1], Path(argv[2])
    try:
        cache.ensure(digest, lambda into: take(blob, into))
    except (LayerError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
