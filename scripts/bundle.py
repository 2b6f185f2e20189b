"""The zip files of the Lambda functions: `make bundle`.

    dist/shoal-lambda-x86_64.zip    dist/shoal-lambda-arm64.zip

Both hold the rooms that the functions run (`api`, `provisioner`, `costs`, the contract of `shoal`) and what
requirements/lambda.txt pins, from wheels alone: nothing is built here, so any machine makes both. The same sources and
the same Python give the same bytes: names are in order, times and modes fixed, bytecode is checked by nothing.

A function's disk is read-only and new at each cold start, so bytecode that is not in the zip would be compiled anew
each time; that is why this needs the Python of the functions (PYTHON), to compile with. Of botocore's 25 MB of service
descriptions only those are kept that the service calls.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: The functions' runtime; `runtime` of the Terraform modules says the same. Every pinned package has wheels for it on
#: both architectures (2026-11).
PYTHON = "3.13"
#: A zip over this cannot be uploaded directly (Lambda quotas, read 2026-11); unpacked the limit is 250 MB.
MAX_ZIP_BYTES = 50 * 1000 * 1000
MAX_UNPACKED_BYTES = 250 * 1000 * 1000
#: What the adapters call, and what the SDK itself calls for credentials.
SERVICES = ("autoscaling", "batch", "dynamodb", "ec2", "ecs", "kms", "s3", "sso", "sso-oidc", "sts")
ROOMS = ("api", "costs", "provisioner", "shoal")
#: The oldest time a zip can say, and what every file is.
_TIME = (1980, 1, 1, 0, 0, 0)
_MODE = 0o100644


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A function's architecture: its name at Lambda, and at the makers of wheels."""

    name: str
    wheels: str

    def platforms(self) -> list[str]:
        """What runs on Amazon Linux 2023 (glibc 2.34), newest first."""
        return [f"manylinux_{version}_{self.wheels}" for version in ("2_34", "2_28", "2_17")] + [
            f"manylinux2014_{self.wheels}"
        ]


ARCHITECTURES = (
    Architecture(name="x86_64", wheels="x86_64"),
    Architecture(name="arm64", wheels="aarch64"),
)


class CannotBundle(Exception):
    """What is missing; the message says what to do."""


def python() -> str:
    """The interpreter of the functions' version: this one, or one on the PATH.

    Raises:
        CannotBundle: There is none.
    """
    named = os.environ.get("SHOAL_BUNDLE_PYTHON")
    candidates = [named] if named else [sys.executable, f"python{PYTHON}", *_pyenv()]
    for candidate in candidates:
        found = shutil.which(candidate)
        if found is None:
            continue
        asked = [found, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        told = subprocess.run(asked, capture_output=True, text=True, check=False)
        if told.returncode == 0 and told.stdout.strip() == PYTHON:
            return found
    raise CannotBundle(
        f"the functions run Python {PYTHON}, and bytecode for it is compiled with it; install python{PYTHON}, or name "
        "one by SHOAL_BUNDLE_PYTHON"
    )


def _pyenv() -> list[str]:
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    return [str(path) for path in sorted(root.glob(f"versions/{PYTHON}.*/bin/python"))]


def download(architecture: Architecture, into: Path) -> list[Path]:
    """Fetch the pinned wheels, each checked against its hash.

    Raises:
        CannotBundle: One is not to be had as a wheel.
    """
    command = [
        sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps",
        "--require-hashes", "--only-binary=:all:", "--implementation", "cp", "--python-version", PYTHON,
        "--abi", "cp" + PYTHON.replace(".", ""), "--abi", "abi3", "--abi", "none",
        *(option for platform in architecture.platforms() for option in ("--platform", platform)),
        "-d", str(into), "-r", str(ROOT / "requirements" / "lambda.txt"),
    ]  # fmt: skip
    if subprocess.run(command, check=False).returncode != 0:
        raise CannotBundle(f"a wheel for {architecture.name} could not be fetched")
    return sorted(into.glob("*.whl"))


def unpack(wheels: list[Path], tree: Path) -> None:
    """Unpack what of the wheels is run."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            latest = _latest_descriptions(archive.namelist())
            for name in sorted(archive.namelist()):
                if not name.endswith("/") and _is_run(name, latest):
                    _write(tree / name, archive.read(name))


def _latest_descriptions(names: list[str]) -> Mapping[str, str]:
    """The newest version that botocore has of each service's description."""
    latest: dict[str, str] = {}
    for name in names:
        parts = name.split("/")
        if parts[:2] == ["botocore", "data"] and len(parts) > 4:
            latest[parts[2]] = max(latest.get(parts[2], ""), parts[3])
    return latest


def _is_run(name: str, latest: Mapping[str, str]) -> bool:
    parts = name.split("/")
    if parts[0].endswith(".dist-info"):
        return parts[-1] in ("METADATA", "entry_points.txt")
    if parts[0].endswith(".data") or name.endswith((".pyi", ".pyx", ".pxd", ".c", ".h", ".pyc", "py.typed")):
        return False
    if any(part in ("tests", "test", "testing", "examples", "__pycache__") for part in parts[:-1]):
        return False
    if parts[:2] == ["botocore", "data"] and len(parts) > 3:
        return parts[2] in SERVICES and parts[3] == latest[parts[2]] and not parts[-1].startswith("examples")
    if parts[:2] == ["boto3", "data"] and len(parts) > 3:
        return parts[2] in SERVICES
    return True


def rooms(tree: Path) -> None:
    """Copy the rooms that the functions run."""
    for path in _sources():
        _write(tree / path.relative_to(ROOT), path.read_bytes())


def _sources() -> Iterator[Path]:
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*")):
            inside = path.relative_to(ROOT).parts
            if not path.is_file() or "__pycache__" in inside or path.suffix == ".pyc":
                continue
            # Of what trainers install, the vocabulary: no client, no command line.
            if room == "shoal" and inside[1] not in ("__init__.py", "contract"):
                continue
            yield path


def compile_tree(interpreter: str, tree: Path) -> None:
    """Compile everything. The bytecode says that nothing need be checked: sources in a function never change."""
    command = [
        interpreter, "-I", "-m", "compileall", "-q", "-f", "-j", "1", "--invalidation-mode", "unchecked-hash",
        "-s", str(tree), "-p", "/var/task", str(tree),
    ]  # fmt: skip
    if subprocess.run(command, check=False).returncode != 0:
        raise CannotBundle("the bundle does not compile")


def write_zip(tree: Path, target: Path) -> None:
    """Zip a tree, the same bytes for the same files.

    Raises:
        CannotBundle: It is larger than Lambda takes.
    """
    files = sorted(path for path in tree.rglob("*") if path.is_file())
    unpacked = sum(path.stat().st_size for path in files)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(target.name + ".part")
    with zipfile.ZipFile(aside, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path in files:
            about = zipfile.ZipInfo(path.relative_to(tree).as_posix(), date_time=_TIME)
            about.compress_type = zipfile.ZIP_DEFLATED
            about.create_system = 3
            about.external_attr = _MODE << 16
            archive.writestr(about, path.read_bytes(), compresslevel=9)
    size = aside.stat().st_size
    if size > MAX_ZIP_BYTES or unpacked > MAX_UNPACKED_BYTES:
        raise CannotBundle(f"{size} bytes zipped and {unpacked} unpacked are more than Lambda takes")
    aside.replace(target)
    print(f"{target}  {size / 1e6:.1f} MB zipped, {unpacked / 1e6:.1f} MB unpacked, {len(files)} files")


def bundle(architecture: Architecture, wheels: list[Path], target: Path, interpreter: str) -> None:
    """Make one zip."""
    with tempfile.TemporaryDirectory(prefix="shoal-bundle-") as work:
        tree = Path(work)
        unpack(wheels, tree)
        rooms(tree)
        compile_tree(interpreter, tree)
        write_zip(tree, target)


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def main() -> int:
    """Make the zips; 1 when that cannot be done."""
    parser = argparse.ArgumentParser(description="Make the zip files of the Lambda functions.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument(
        "--arch", choices=[each.name for each in ARCHITECTURES], action="append", help="(default: both)"
    )
    given = parser.parse_args()
    try:
        interpreter = python()
        for architecture in ARCHITECTURES:
            if given.arch and architecture.name not in given.arch:
                continue
            with tempfile.TemporaryDirectory(prefix="shoal-wheels-") as work:
                wheels = download(architecture, Path(work))
                bundle(architecture, wheels, given.out / f"shoal-lambda-{architecture.name}.zip", interpreter)
    except CannotBundle as error:
        print(f"bundle: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
