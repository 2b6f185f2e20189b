"""The few kernel calls a sandbox's disk needs, without a subprocess for any of them.

Each function raises `OSError` with the kernel's errno and the call's name. Everything here is
blocking and thread-safe; `ctypes` releases the interpreter lock during a call.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import struct
from collections.abc import Iterator
from typing import Final

# Numbers from include/uapi/asm-generic/unistd.h: one table for all architectures since Linux 5.1.
_SYS_OPEN_TREE: Final = 428
_SYS_MOVE_MOUNT: Final = 429
_SYS_MOUNT_SETATTR: Final = 442

_AT_FDCWD: Final = -100
_AT_EMPTY_PATH: Final = 0x1000
_OPEN_TREE_CLONE: Final = 1
_OPEN_TREE_CLOEXEC: Final = os.O_CLOEXEC
_MOVE_MOUNT_F_EMPTY_PATH: Final = 0x4
_MOUNT_ATTR_IDMAP: Final = 0x00100000

MS_RDONLY: Final = 1
MS_NOSUID: Final = 2
MS_NODEV: Final = 4
MS_NOATIME: Final = 1024
MS_PRIVATE: Final = 1 << 18
MNT_DETACH: Final = 2

# include/uapi/linux/loop.h
_LOOP_CTL_GET_FREE: Final = 0x4C82
_LOOP_CONFIGURE: Final = 0x4C0A
_LOOP_CLR_FD: Final = 0x4C01
_LO_FLAGS_AUTOCLEAR: Final = 4
_LOOP_CONFIG_BYTES: Final = 304
_LOOP_INFO_FLAGS_OFFSET: Final = 8 + 52

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _failed(call: str, path: str = "") -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}", path or None)


def mount(source: str, target: str, fstype: str, flags: int = 0, options: str = "") -> None:
    """mount(2)."""
    if _libc.mount(
        source.encode(), target.encode(), fstype.encode(), ctypes.c_ulong(flags), options.encode()
    ):
        raise _failed(f"mount {fstype}", target)


def unmount(target: str, flags: int = 0) -> None:
    """umount2(2); `target` is never followed when it is a symlink."""
    umount_nofollow = 8
    if _libc.umount2(target.encode(), ctypes.c_int(flags | umount_nofollow)):
        raise _failed("umount2", target)


def idmapped_clone(path: str, userns_fd: int | None) -> int:
    """A detached copy of the mount tree at `path`, its ids mapped through a user namespace (None: as they are).

    Returns an open descriptor of the detached mount; it goes away when that is closed and nothing
    uses it. Raises EINVAL where the filesystem does not allow id mapping.
    """
    tree = _libc.syscall(
        _SYS_OPEN_TREE,
        ctypes.c_int(_AT_FDCWD),
        ctypes.c_char_p(path.encode()),
        ctypes.c_uint(_OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC),
    )
    if tree < 0:
        raise _failed("open_tree", path)
    # struct mount_attr: attr_set, attr_clr, propagation, userns_fd (include/uapi/linux/mount.h)
    mapped = (0, 0) if userns_fd is None else (_MOUNT_ATTR_IDMAP, userns_fd)
    attributes = struct.pack("=QQQQ", mapped[0], 0, MS_PRIVATE, mapped[1])
    if _libc.syscall(
        _SYS_MOUNT_SETATTR,
        ctypes.c_int(tree),
        ctypes.c_char_p(b""),
        ctypes.c_uint(_AT_EMPTY_PATH),
        ctypes.c_char_p(attributes),
        ctypes.c_size_t(len(attributes)),
    ):
        error = _failed("mount_setattr", path)
        os.close(tree)
        raise error
    return int(tree)


def attach_mount(tree_fd: int, target: str) -> None:
    """move_mount(2): makes a detached mount appear at `target`."""
    if _libc.syscall(
        _SYS_MOVE_MOUNT,
        ctypes.c_int(tree_fd),
        ctypes.c_char_p(b""),
        ctypes.c_int(_AT_FDCWD),
        ctypes.c_char_p(target.encode()),
        ctypes.c_uint(_MOVE_MOUNT_F_EMPTY_PATH),
    ):
        raise _failed("move_mount", target)


@contextlib.contextmanager
def as_filesystem_user(fsid: int) -> Iterator[None]:
    """Lets this thread make files as user and group `fsid`, with all its capabilities.

    What overlayfs makes by itself (its work directory, whiteouts) belongs to who mounted it, and that
    id must exist on an idmapped upper. Changing the filesystem uid drops the capabilities for files, so
    they are raised again; both are per thread.
    """
    _libc.setfsgid(ctypes.c_uint(fsid))
    _libc.setfsuid(ctypes.c_uint(fsid))
    try:
        _raise_capabilities()
        yield
    finally:
        _libc.setfsuid(ctypes.c_uint(0))
        _libc.setfsgid(ctypes.c_uint(0))


def _raise_capabilities() -> None:
    # include/uapi/linux/capability.h: version 3 has two words of effective, permitted, inheritable.
    header = struct.pack("=Ii", 0x20080522, 0)
    data = ctypes.create_string_buffer(24)
    if _libc.capget(header, data):
        raise _failed("capget")
    words = list(struct.unpack("=6I", data.raw))
    words[0], words[3] = words[1], words[4]
    if _libc.capset(header, struct.pack("=6I", *words)):
        raise _failed("capset")


def attach_loop(image: str) -> tuple[str, int]:
    """A free loop device backed by the file `image`: (device path, open descriptor).

    The device detaches by itself when its last user is gone: the descriptor, then the mount made
    from it. Raises ENXIO or ENOENT where the kernel has no loop devices.
    """
    backing = os.open(image, os.O_RDWR | os.O_CLOEXEC)
    control = -1
    try:
        control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
        while True:
            number = fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
            device = f"/dev/loop{number}"
            # A node made by devtmpfs a moment ago may be missing where /dev is not devtmpfs.
            if not os.path.exists(device):
                os.mknod(device, 0o600 | 0o060000, os.makedev(7, number))
            loop = os.open(device, os.O_RDWR | os.O_CLOEXEC)
            config = bytearray(_LOOP_CONFIG_BYTES)
            struct.pack_into("=II", config, 0, backing, 4096)
            struct.pack_into("=I", config, _LOOP_INFO_FLAGS_OFFSET, _LO_FLAGS_AUTOCLEAR)
            try:
                fcntl.ioctl(loop, _LOOP_CONFIGURE, bytes(config))
            except OSError as error:
                os.close(loop)
                # Another thread or process took the device between the two calls.
                if error.errno == 16:  # EBUSY
                    continue
                raise
            return device, loop
    finally:
        os.close(backing)
        if control >= 0:
            os.close(control)


def detach_loop(device: str) -> None:
    """Detaches a loop device; one in use is detached when its last user lets go."""
    loop = os.open(device, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(loop, _LOOP_CLR_FD)
    finally:
        os.close(loop)
