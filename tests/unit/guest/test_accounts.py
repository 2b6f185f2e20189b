"""Users by the sandbox's own files, whatever those are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runtime_image.guest import accounts
from runtime_image.guest.accounts import find_account, find_ids

PASSWD = """\
root:x:0:0:root:/root:/bin/bash
# a comment
broken:x:notanumber:1::/:
dev:x:1000:1001:Dev,,,:/home/dev:/bin/zsh
1000:x:77:77::/numeric:/bin/sh
bare:x:5:6:::
short:x:1
"""
GROUP = """\
root:x:0:
dev:x:1001:
docker:x:999:other,dev
audio:x:29:dev
bad:x:nan:dev
"""


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "passwd").write_text(PASSWD)
    (tmp_path / "group").write_text(GROUP)
    monkeypatch.setattr(accounts, "PASSWD", str(tmp_path / "passwd"))
    monkeypatch.setattr(accounts, "GROUP", str(tmp_path / "group"))


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        (None, (0, 0, [], "root", "/root", "/bin/bash")),
        ("root", (0, 0, [], "root", "/root", "/bin/bash")),
        ("dev", (1000, 1001, [999, 29], "dev", "/home/dev", "/bin/zsh")),
        ("1000", (77, 77, [], "1000", "/numeric", "/bin/sh")),
        ("dev:audio", (1000, 29, [], "dev", "/home/dev", "/bin/zsh")),
        ("4242", (4242, 0, [], "4242", "/", "/bin/sh")),
        ("4242:4243", (4242, 4243, [], "4242", "/", "/bin/sh")),
        ("bare", (5, 6, [], "bare", "/", "/bin/sh")),
    ],
)
def test_names_and_numbers(user: str | None, expected: tuple[object, ...]) -> None:
    """Entries by name first, then by number; numbers need no entry."""
    found = find_account(user)
    assert (found.uid, found.gid, found.groups, found.name, found.home, found.shell) == expected


@pytest.mark.parametrize(
    "user", ["nobody", "", "dev:", ":dev", "dev:nogroup", "broken", "-1", "4294967295", "short"]
)
def test_what_names_nobody_is_an_error(user: str) -> None:
    """Never somebody else instead."""
    with pytest.raises(OSError):
        find_account(user or ":")


@pytest.mark.parametrize(
    ("owner", "expected"),
    [("dev", (1000, 1001)), ("dev:0", (1000, 0)), (":audio", (-1, 29)), ("7:8", (7, 8))],
)
def test_owners(owner: str, expected: tuple[int, int]) -> None:
    """`user`, `user:group`, `:group`."""
    assert find_ids(owner) == expected


@pytest.mark.parametrize("kind", ["missing", "fifo", "directory", "binary"])
def test_odd_files_leave_root_and_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """An image without these files, or a sandbox that made them into traps, still has root."""
    path = tmp_path / "odd"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "binary":
        path.write_bytes(bytes(range(256)) * 100)
    monkeypatch.setattr(accounts, "PASSWD", str(path))
    monkeypatch.setattr(accounts, "GROUP", str(path))
    assert find_account(None).home == "/root"
    assert find_account("root").uid == 0
    assert find_account("12").uid == 12
    with pytest.raises(OSError):
        find_account("dev")
