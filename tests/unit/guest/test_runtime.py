"""The guest's runtime directory: whole, readable, named by its content."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from runtime_image.agent import guest_runtime
from runtime_image.agent.guest_runtime import (
    GUEST_ENV,
    GUEST_MOUNT,
    GuestRuntimeError,
    build_guest_runtime,
    guest_argv,
    runtime_argv,
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for those that only look."""
    return build_guest_runtime(tmp_path_factory.mktemp("runtime"))


def test_building_again_gives_the_same_directory_untouched(tmp_path: Path) -> None:
    """Same inputs, same name; what exists is not written again, and nothing else is left beside it."""
    first = build_guest_runtime(tmp_path)
    before = {path: path.stat().st_ino for path in first.rglob("*")}
    assert build_guest_runtime(tmp_path) == first
    assert {path: path.stat().st_ino for path in first.rglob("*")} == before
    assert os.listdir(tmp_path) == [first.name]


def test_another_content_has_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of what goes in never changes a runtime that is mounted somewhere."""
    first = build_guest_runtime(tmp_path)
    monkeypatch.setattr(guest_runtime, "_FORMAT", b"another")
    assert build_guest_runtime(tmp_path) != first


def test_everybody_may_read_and_nobody_write(root: Path) -> None:
    """Processes of any user of a sandbox run from it."""
    for path in (root, *root.rglob("*")):
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert mode == (
            0o755 if path.is_dir() or path.parent.name == "bin" or path.name == "ld.so" else 0o644
        )
        assert not path.is_symlink()


def test_it_runs_from_its_own_files_alone(root: Path) -> None:
    """Every file the interpreter maps or imports at start is in the runtime; no source is compiled."""
    *command, _, _ = runtime_argv(root)
    script = (
        "import sys\n"
        "from shoal_guest import init\n"
        "print([m.__file__ for m in sys.modules.values() if getattr(m, '__file__', None)])\n"
        "print(sorted({line.split()[-1] for line in open('/proc/self/maps') if '/' in line}))\n"
    )
    done = subprocess.run([*command, "-c", script], env=GUEST_ENV, capture_output=True, text=True, check=True)
    files = [path for line in done.stdout.splitlines() for path in eval(line)]
    assert len(files) > 15
    assert [path for path in files if not path.startswith(f"{root}/")] == []


def test_few_modules_at_start(root: Path) -> None:
    """Each sandbox pays for what is imported; the heavy ones stay out."""
    *command, _, _ = runtime_argv(root)
    script = "import sys; from shoal_guest import init; print(*sys.modules)"
    done = subprocess.run([*command, "-c", script], env=GUEST_ENV, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & {
        "re",
        "enum",
        "typing",
        "json",
        "socket",
        "signal",
        "subprocess",
        "collections",
        "ctypes",
        "site",
    }
    assert len(loaded) < 60


def test_the_command_is_in_the_mount(root: Path) -> None:
    """Inside a sandbox the same command runs from GUEST_MOUNT."""
    assert guest_argv()[0] == f"{GUEST_MOUNT}/lib/ld.so"
    for word in guest_argv():
        if word.startswith(GUEST_MOUNT):
            assert (root / word.removeprefix(GUEST_MOUNT + "/")).exists()


def test_a_machine_without_python_is_told(tmp_path: Path) -> None:
    """The error says what to install; nothing is left."""
    with pytest.raises(GuestRuntimeError, match="install python3"):
        build_guest_runtime(tmp_path, python=tmp_path / "absent")
    assert os.listdir(tmp_path) == []
