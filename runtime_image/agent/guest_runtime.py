"""Builds what the guest runs on: an interpreter that needs nothing of the image it is mounted into.

A directory of its own loader, interpreter, shared libraries, the few modules of the standard
library that the guest uses, and the guest itself, compiled. It is bound read-only into every
sandbox at `GUEST_MOUNT`, so musl images, images without Python and images without any program
work alike, and the page cache holds one copy for all sandboxes of a host.

The source is the machine's own Python package (`/usr/bin/python3`), whose version the tests pin
down to what the guest supports.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

GUEST_MOUNT = "/.shoal"

# The guest's process environment; RUNTIME-side code must pass exactly this. `LC_ALL=C` and the
# empty zone keep libc from opening locale and zone files, which belong to the sandbox.
GUEST_ENV = {"LC_ALL": "C", "TZ": ":"}

_FORMAT = b"1"
_GUEST_PACKAGE = "shoal_guest"
_START = f"from {_GUEST_PACKAGE}.init import main; main()"
# What the guest imports at start, and what its workers import when they need it.
_MODULES = (
    "encodings.utf_8", "encodings.ascii", "encodings.latin_1",
    "__future__", "os", "io", "struct", "resource", "termios", "_ctypes",
    "re", "fnmatch", "difflib", "tarfile", "warnings",
)  # fmt: skip
_ALIASES = """\
aliases = {
    "ascii": "ascii", "us_ascii": "ascii", "646": "ascii", "utf8": "utf_8", "u8": "utf_8",
    "latin1": "latin_1", "iso8859_1": "latin_1", "8859": "latin_1",
}
"""
# Read by the dynamic loader before anything else runs, whatever its options; in a sandbox it would
# be the sandbox's. The copied loader looks for a name of the same length that is ours and absent.
_PRELOAD, _NO_PRELOAD = b"/etc/ld.so.preload", b"/.shoal/no.preload"


class GuestRuntimeError(Exception):
    """The machine's Python cannot be made into a guest runtime; the message says why."""


def guest_argv() -> list[str]:
    """The command that starts the guest inside a sandbox, its end of the link as descriptor 0."""
    return runtime_argv(Path(GUEST_MOUNT))


def runtime_argv(root: Path) -> list[str]:
    """As `guest_argv`, for a runtime directory at `root` (for tests without a sandbox)."""
    python = f"{root}/bin/python3"
    return [
        f"{root}/lib/ld.so", "--inhibit-cache", "--library-path", f"{root}/lib", "--argv0", python,
        python, "-I", "-S", "-E", "-B", "-X", "utf8", "-c", _START,
    ]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Sources:
    """Everything that goes in."""

    python: Path
    version: str
    loader: Path
    libraries: dict[str, Path]
    stdlib: dict[str, Path]
    extensions: dict[str, Path]
    guest: dict[str, Path]

    def digest(self) -> str:
        """Over the names and bytes of all of it."""
        total = hashlib.sha256(_FORMAT + _ALIASES.encode() + _NO_PRELOAD + self.version.encode())
        groups = (self.libraries, self.stdlib, self.extensions, self.guest)
        files = {"python": self.python, "loader": self.loader}
        for name, path in [*files.items(), *(item for group in groups for item in sorted(group.items()))]:
            total.update(f"{name}\0".encode())
            total.update(hashlib.sha256(path.read_bytes()).digest())
        return total.hexdigest()


def build_guest_runtime(out: Path, *, python: Path = Path("/usr/bin/python3")) -> Path:
    """Make the runtime under `out` unless it is there already.

    Args:
        out: directory that holds runtimes, made when absent.
        python: the interpreter to copy, a CPython of the system's package manager.

    Returns:
        The runtime's directory, named by its content; never changed once it exists. Root-owned
        when root builds it, readable by everybody.

    Raises:
        GuestRuntimeError: the interpreter is missing or not usable.
    """
    sources = _find_sources(python)
    target = out / f"guest-{sources.digest()[:16]}"
    if target.is_dir():
        return target
    out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".guest-", dir=out))
    try:
        _fill(work, sources)
        for path in (work, *work.rglob("*")):
            path.chmod(0o755 if path.is_dir() or path.parent.name == "bin" or path.name == "ld.so" else 0o644)
        try:
            work.rename(target)
        except OSError:
            # Another process was first; content-addressed, so its result is ours.
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _find_sources(python: Path) -> _Sources:
    if not python.exists():
        raise GuestRuntimeError(f"{python} does not exist: install python3")
    binary = python.resolve()
    script = (
        "import os, sys\n"
        # Compression that the tar streams do not use.
        "sys.modules['bz2'] = sys.modules['lzma'] = None\n"
        f"for name in {_MODULES!r}: __import__(name)\n"
        "print(sys.version_info[0], sys.version_info[1], os.path.dirname(os.__file__))\n"
        "for name, module in sorted(sys.modules.items()):\n"
        "    path = getattr(module, '__file__', None)\n"
        "    if path and name[:7] != '_frozen': print(path)\n"
    )
    lines = _run([str(binary), "-I", "-S", "-E", "-B", "-X", "frozen_modules=off", "-c", script]).splitlines()
    major, minor, stdlib_root = lines[0].split(" ", 2)
    if (int(major), int(minor)) < (3, 11):
        raise GuestRuntimeError(f"{python} is Python {major}.{minor}; the guest needs 3.11")
    files = [Path(line) for line in lines[1:]]
    extensions = {file.name: file for file in files if file.suffix == ".so"}
    stdlib = {str(file.relative_to(stdlib_root)): file for file in files if file.suffix == ".py"}
    loader, libraries = _libraries([binary, *extensions.values()])
    package = Path(__file__).resolve().parent.parent / "guest"
    return _Sources(
        python=binary,
        version=f"{major}.{minor}",
        loader=loader,
        libraries=libraries,
        stdlib=stdlib,
        extensions=extensions,
        guest={path.name: path for path in package.glob("*.py")},
    )


def _libraries(binaries: list[Path]) -> tuple[Path, dict[str, Path]]:
    loader: Path | None = None
    libraries: dict[str, Path] = {}
    for binary in binaries:
        for line in _run(["ldd", str(binary)]).splitlines():
            if match := re.match(r"\s*(\S+) => (/\S+)", line):
                libraries[match[1]] = Path(match[2]).resolve()
            elif match := re.match(r"\s*(/\S+ld-\S+)", line):
                loader = Path(match[1]).resolve()
    if loader is None:
        raise GuestRuntimeError(f"{binaries[0]} names no dynamic loader")
    return loader, libraries


def _run(argv: list[str]) -> str:
    try:
        done = subprocess.run(
            argv, check=True, capture_output=True, text=True, env={"PATH": os.defpath, "LC_ALL": "C"}
        )
    except (OSError, subprocess.CalledProcessError) as err:
        raise GuestRuntimeError(f"{argv[0]}: {err} {getattr(err, 'stderr', '') or ''}".strip()) from err
    return done.stdout


def _fill(root: Path, sources: _Sources) -> None:
    library = root / "lib" / f"python{sources.version}"
    (root / "bin").mkdir()
    (library / "lib-dynload").mkdir(parents=True)
    shutil.copyfile(sources.python, root / "bin" / "python3")
    loader = sources.loader.read_bytes()
    if loader.count(_PRELOAD) != 1:
        raise GuestRuntimeError(f"{sources.loader} does not name {_PRELOAD.decode()} once")
    (root / "lib" / "ld.so").write_bytes(loader.replace(_PRELOAD, _NO_PRELOAD))
    for name, path in sources.libraries.items():
        shutil.copyfile(path, root / "lib" / name)
    for name, path in sources.extensions.items():
        shutil.copyfile(path, library / "lib-dynload" / name)
    with tempfile.TemporaryDirectory(prefix="shoal-guest-") as aside:
        aliases = Path(aside) / "aliases.py"
        aliases.write_text(_ALIASES)
        modules = dict(sources.stdlib)
        modules["encodings/aliases.py"] = aliases
        modules |= {f"{_GUEST_PACKAGE}/{name}": path for name, path in sources.guest.items()}
        jobs = []
        for name, path in modules.items():
            compiled = library / (name + "c")
            compiled.parent.mkdir(parents=True, exist_ok=True)
            jobs.append((str(path), str(compiled), f"<guest>/{name}"))
        _compile(sources.python, jobs)
    # Run by the image's Python, whatever version that is.
    driver = sources.guest["driver.py"]
    shutil.copyfile(driver, library / _GUEST_PACKAGE / driver.name)


def _compile(python: Path, jobs: list[tuple[str, str, str]]) -> None:
    # No docstrings, no column tables, no check against a source that is not there.
    script = (
        "import py_compile, sys\n"
        f"for source, target, name in {jobs!r}:\n"
        "    py_compile.compile(source, target, name, doraise=True, optimize=2,\n"
        "        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)\n"
    )
    _run([str(python), "-I", "-S", "-E", "-B", "-X", "no_debug_ranges", "-c", script])
