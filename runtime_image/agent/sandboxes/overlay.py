"""Composes a sandbox's root filesystem: idmapped layers under one private, idmapped upper.

Layers and upper keep their ids unshifted on disk, so that they are shared by all sandboxes and packed
as they are; each sandbox sees them through mounts mapped to its own id range. Overlayfs makes private
copies of those mounts, so they need no place in the mount table, and the mount options name only
descriptors: `/proc/self/mountinfo` inside tells no host path.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from runtime_image.agent.sandboxes import syscalls
from runtime_image.agent.sandboxes.identities import Identity

# `volatile`: fsync inside is free; a disk never outlives a crash of its host. The others keep the upper
# a plain OCI-like layer that can be packed and put under another upper.
_OPTIONS: Final = "index=off,metacopy=off,redirect_dir=off,xino=off,volatile"

ROOT_FLAGS: Final = syscalls.MS_NODEV | syscalls.MS_NOSUID


def mount_overlay(
    *,
    layers: Sequence[Path],
    disk: Path,
    target: Path,
    scratch: Path,
    identity: Identity | None,
    flags: int = ROOT_FLAGS,
) -> None:
    """Mounts `layers` (bottom first) and the upper of `disk` (a mounted disk) at `target`.

    `scratch` is an existing empty directory of this sandbox, used on kernels that accept only attached
    layers; nothing stays mounted there. Without an identity ids are not mapped.
    """
    with contextlib.ExitStack() as stack:
        trees: list[int] = []
        for path in (disk, *reversed(layers)):
            tree = syscalls.idmapped_clone(str(path), identity.userns_fd if identity else None)
            stack.callback(os.close, tree)
            trees.append(tree)
        if identity is not None:
            stack.enter_context(syscalls.as_filesystem_user(identity.id_base))
        try:
            _mount(trees, target, flags)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # Before Linux 6.15 overlayfs takes layers of its own mount namespace only.
            for number, tree in enumerate(trees):
                place = scratch / str(number)
                place.mkdir(exist_ok=True)
                syscalls.attach_mount(tree, str(place))
                stack.callback(syscalls.unmount, str(place), syscalls.MNT_DETACH)
            _mount(trees, target, flags)
    # Overlayfs falls back to read-only, with a word in the kernel's log, when it cannot use the upper.
    if os.statvfs(target).f_flag & os.ST_RDONLY:
        raise OSError(errno.EROFS, "overlayfs cannot write to the upper", str(target))


def _mount(trees: Sequence[int], target: Path, flags: int) -> None:
    disk, *lowers = (f"/proc/self/fd/{tree}" for tree in trees)
    options = f"lowerdir={':'.join(lowers)},upperdir={disk}/upper,workdir={disk}/work,{_OPTIONS}"
    syscalls.mount("overlay", str(target), "overlay", flags, options)
