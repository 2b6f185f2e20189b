"""Users and groups as the sandbox's own /etc/passwd and /etc/group say.

Read by hand: the libc of the guest's interpreter would look up its own name services. Whatever the
sandbox makes of these files cannot hold up the guest: only regular ones are read, without waiting,
and no more than a MiB.
"""

from __future__ import annotations

import os
import stat
from errno import EINVAL, ENOENT

PASSWD, GROUP = "/etc/passwd", "/etc/group"
_FILE_LIMIT = 1 << 20


class Account:
    """Who a process runs as: ids, supplementary groups, name, home directory, shell."""

    __slots__ = ("gid", "groups", "home", "name", "shell", "uid")

    def __init__(self, uid: int, gid: int, groups: list[int], name: str, home: str, shell: str) -> None:
        self.uid = uid
        self.gid = gid
        self.groups = groups
        self.name = name
        self.home = home
        self.shell = shell


class Accounts:
    """Remembers what was looked up until one of the files changes: a look-up in every child would
    cost a fifth of a bare exec."""

    def __init__(self) -> None:
        self._seen: object = None
        self._known: dict[str | None, Account] = {}

    def find(self, user: str | None) -> Account:
        """As `find_account`."""
        seen = [_fingerprint(path) for path in (PASSWD, GROUP)]
        if seen != self._seen or len(self._known) > 64:
            self._known.clear()
            self._seen = seen
        account = self._known.get(user)
        if account is None:
            account = self._known[user] = find_account(user)
        return account


def _fingerprint(path: str) -> object:
    try:
        info = os.stat(path)
    except OSError:
        return None
    return info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns


def find_account(user: str | None) -> Account:
    """The account `user` names: None (root), a name, a uid, `name:group`, `uid:gid`.

    A uid without an entry is allowed (home `/`, group 0 unless given), as is everybody who is only
    a number; a name without an entry is not.

    Raises:
        OSError: ENOENT for an unknown user or group, EINVAL for what cannot be one.
    """
    wanted, colon, wanted_group = (user or "0").partition(":")
    if not wanted or (colon and not wanted_group):
        raise OSError(EINVAL, f"not a user: {user!r}")
    number = _number(wanted)
    entry = None
    for fields in _entries(PASSWD, 7, wanted):
        # A name may look like a number; the name wins, as in useradd's own tools.
        if fields[0] == wanted or (entry is None and number is not None and _number(fields[2]) == number):
            entry = fields
            if fields[0] == wanted:
                break
    if entry is not None:
        name, home, shell = entry[0], entry[5] or "/", entry[6] or "/bin/sh"
        uid, gid = _number(entry[2]), _number(entry[3])
        if uid is None or gid is None:
            raise OSError(EINVAL, f"the entry of {wanted} in /etc/passwd is broken")
    elif number is not None:
        uid, gid = number, 0
        name, home, shell = ("root", "/root", "/bin/sh") if number == 0 else (wanted, "/", "/bin/sh")
    elif wanted == "root":
        uid, gid, name, home, shell = 0, 0, "root", "/root", "/bin/sh"
    else:
        raise OSError(ENOENT, f"no user {wanted!r}")
    if wanted_group:
        return Account(uid, _find_group(wanted_group), [], name, home, shell)
    groups = []
    for fields in _entries(GROUP, 4, name):
        member_of = _number(fields[2])
        if member_of is not None and name in fields[3].split(",") and member_of not in groups:
            groups.append(member_of)
    return Account(uid, gid, groups, name, home, shell)


def find_ids(owner: str) -> tuple[int, int]:
    """Uid and gid for an owner of files: `user`, `user:group` or `:group` (uid -1: unchanged).

    Raises:
        OSError: as `find_account`.
    """
    if owner.startswith(":"):
        return -1, _find_group(owner[1:])
    account = find_account(owner)
    return account.uid, account.gid


def _find_group(wanted: str) -> int:
    number = _number(wanted)
    for fields in _entries(GROUP, 4, wanted):
        if fields[0] == wanted:
            number = _number(fields[2])
            break
    if number is None:
        raise OSError(ENOENT, f"no group {wanted!r}")
    return number


def _number(text: str) -> int | None:
    # The last id means "no change" to the kernel.
    return (
        int(text)
        if len(text) <= 10 and text.isascii() and text.isdigit() and int(text) < 0xFFFFFFFF
        else None
    )


def _entries(path: str, columns: int, about: str) -> list[list[str]]:
    """The lines that have `about` in them, split."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return []
        data = os.read(fd, _FILE_LIMIT)
    except OSError:
        return []
    finally:
        os.close(fd)
    lines = data.decode("utf-8", "surrogateescape").split("\n")
    return [fields for line in lines if about in line and len(fields := line.split(":")) >= columns]
