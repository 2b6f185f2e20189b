"""A sandbox's private disk: an ext4 image without journal on a loop device, in a few sizes.

A loop-mounted image is a hard limit on space and inodes on every kernel; project quotas are not. The
image of each class is formatted once and copied with its holes, which takes about a millisecond. The
journal would only double the writes: a disk never outlives a crash of its host.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import subprocess
from pathlib import Path
from typing import Final

from runtime_image.agent.sandboxes import syscalls
from runtime_image.agent.sandboxes.model import DISK_CLASSES_MIB, NotSupported, SandboxRuntimeError

# Part of the template's file name: a change of how it is formatted makes new templates.
_TEMPLATE_VERSION: Final = 1
# `^orphan_file` where mke2fs knows it is not needed without a journal; no reserved blocks, since root
# inside is not root of the filesystem; inode tables are left as the zeros of a sparse file, and the
# mount says `noinit_itable`, so that the kernel does not write them out later.
_MKFS: Final = (
    "mkfs.ext4", "-q", "-F", "-b", "4096", "-m", "0", "-I", "256",
    "-O", "^has_journal,^resize_inode,^metadata_csum,uninit_bg,sparse_super2,extent,flex_bg,dir_index",
    "-E", "lazy_itable_init=1,nodiscard,root_owner=0:0,num_backup_sb=0",
    "-U", "73686f61-6c00-4000-8000-000000000000",
)  # fmt: skip
_COPY_CHUNK: Final = 1 << 30

# fs/ext4: stop all writing at once, throwing dirty pages away; for a disk about to be removed.
_EXT4_IOC_SHUTDOWN: Final = 0x8004587D
_SHUTDOWN_NO_LOG_FLUSH: Final = 2


def disk_class(disk_mib: int) -> int:
    """The smallest class that holds `disk_mib`. Raises ValueError beyond the largest."""
    for size in DISK_CLASSES_MIB:
        if disk_mib <= size:
            return size
    raise ValueError(f"disk_mib is at most {DISK_CLASSES_MIB[-1]}")


class DiskStore:
    """Templates of the classes, and copies of them. Blocking, thread-safe."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def template(self, class_mib: int) -> Path:
        """The formatted image of a class, made at first use."""
        path = self._directory / f"ext4-{class_mib}mib-v{_TEMPLATE_VERSION}.img"
        if path.exists():
            return path
        if shutil.which("mkfs.ext4") is None:
            raise NotSupported("mkfs.ext4 is missing", "run: apt-get install e2fsprogs")
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        aside = path.with_suffix(f".{secrets.token_hex(4)}")
        tree = aside.with_name(f"{aside.name}.tree")
        try:
            (tree / "upper").mkdir(parents=True, mode=0o755)
            (tree / "work").mkdir(mode=0o755)
            with open(aside, "xb") as image:
                os.ftruncate(image.fileno(), class_mib << 20)
            made = subprocess.run([*_MKFS, "-d", str(tree), str(aside)], capture_output=True, text=True)
            if made.returncode:
                raise SandboxRuntimeError(f"mkfs.ext4 failed: {made.stderr.strip()}")
            aside.rename(path)
        finally:
            shutil.rmtree(tree, ignore_errors=True)
            aside.unlink(missing_ok=True)
        return path

    def create(self, image: Path, class_mib: int) -> None:
        """Makes a fresh disk image at `image`, which must not exist."""
        source = os.open(self.template(class_mib), os.O_RDONLY | os.O_CLOEXEC)
        try:
            target = os.open(image, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                _copy_sparse(source, target)
            finally:
                os.close(target)
        finally:
            os.close(source)


def mount_disk(image: Path, target: Path) -> str:
    """Mounts a disk image; returns the loop device, which detaches itself with the last unmount."""
    device, loop = syscalls.attach_loop(str(image))
    try:
        flags = syscalls.MS_NOATIME | syscalls.MS_NODEV | syscalls.MS_NOSUID
        syscalls.mount(device, str(target), "ext4", flags, "noinit_itable,errors=remount-ro,nobarrier")
    finally:
        os.close(loop)
    return device


def abandon_disk(target: Path) -> None:
    """Drops what a mounted disk has not written yet; the disk only answers EIO after that."""
    with contextlib.suppress(OSError):
        root = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.ioctl(root, _EXT4_IOC_SHUTDOWN, _SHUTDOWN_NO_LOG_FLUSH.to_bytes(4, "little"))
        finally:
            os.close(root)


def used_bytes(target: Path) -> int:
    """What is allocated on a mounted disk."""
    found = os.statvfs(target)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def is_full(target: Path) -> bool:
    """Whether a mounted disk has no room, or no inode, for a file of any size: writers fail shortly before the last
    block is gone, so the last 256th part, 1 to 16 MiB, counts as none."""
    found = os.statvfs(target)
    # Not `f_bfree`: ext4 keeps clusters back for its own growth, which no writer gets.
    left, whole = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    return left < min(max(whole >> 8, 1 << 20), 16 << 20) or found.f_favail == 0


def _copy_sparse(source: int, target: int) -> None:
    size = os.fstat(source).st_size
    os.ftruncate(target, size)
    offset = 0
    while offset < size:
        try:
            start = os.lseek(source, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == 6:  # ENXIO: only a hole is left
                return
            raise
        end = os.lseek(source, start, os.SEEK_HOLE)
        while start < end:
            copied = os.copy_file_range(source, target, min(end - start, _COPY_CHUNK), start, start)
            if copied == 0:
                raise SandboxRuntimeError("the disk template ended early")
            start += copied
        offset = end
