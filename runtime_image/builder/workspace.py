"""A workspace layer from a library's source distribution, with a bug planted for an agent to find."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from runtime_image.builder.build import build_layer
from runtime_image.builder.errors import BuildError, BuildReason
from runtime_image.builder.manifest import ImageLayer, LayerRole
from runtime_image.builder.progress import Progress, silent
from runtime_image.layers import LayerError, remove_tree, unpack

_MAX_SOURCE_BYTES = 256 * 1024 * 1024


class PlantedBug(BaseModel):
    """One replacement that breaks a library.

    Attributes:
        right, wrong: Each occurs exactly once in its version of the file, so that one edit by
            replacement undoes it.
        failing_tests: Pytest node ids that fail while it is planted; all others pass.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    file: str
    right: str
    wrong: str
    failing_tests: tuple[str, ...] = ()


class WorkspaceSpec(BaseModel):
    """A workspace as its TOML file under `examples/workspaces` says it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")
    version: str
    prefix: str = Field(default="/workspace", pattern=r"^/[^\x00]+$")
    test_command: str = "python3 -m pytest -q"
    bug: PlantedBug | None = None


def load_workspace(path: Path) -> WorkspaceSpec:
    """Reads a workspace's file.

    Raises:
        BuildError: `bad_recipe`.
    """
    try:
        return WorkspaceSpec.model_validate(tomllib.loads(path.read_text()))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, ValidationError) as error:
        raise BuildError(BuildReason.BAD_RECIPE, f"{path}: {error}") from error


def fetch_source(spec: WorkspaceSpec, requirements: Path, into: Path) -> Path:
    """Fetches the source distribution with pip, checked against the pinned hash.

    Args:
        requirements: A requirements file with `--hash` pins that lists it.
        into: An existing directory. What is there already and fits the pin is not fetched again.

    Returns:
        The archive.

    Raises:
        BuildError: `pull_failed`.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    command += ["--require-hashes", "--requirement", str(requirements), "--dest", str(into)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    found = sorted(into.glob(f"{spec.name}-{spec.version}.tar.gz"))
    if done.returncode != 0 or not found:
        tail = "\n".join(done.stderr.splitlines()[-10:])
        raise BuildError(BuildReason.PULL_FAILED, f"pip could not fetch {spec.name}=={spec.version}:\n{tail}")
    return found[0]


def build_workspace(
    spec: WorkspaceSpec, source: Path, out: Path, *, progress: Progress = silent
) -> ImageLayer:
    """Packs a source distribution as a workspace layer, its bug planted.

    Args:
        source: The `.tar.gz`.
        out: Where the blob goes.

    Raises:
        BuildError: `bad_archive` or `bad_recipe`: the bug does not fit the source.
    """
    progress("workspace", source=source.name)
    with tempfile.TemporaryDirectory(prefix="shoal-workspace-") as scratch:
        tree = Path(scratch) / "tree"
        try:
            unpack(source, tree, max_bytes=_MAX_SOURCE_BYTES)
            tops = [top for top in tree.iterdir() if top.is_dir() and not top.is_symlink()]
            if len(tops) != 1:
                raise BuildError(BuildReason.BAD_ARCHIVE, f"{source.name} is no source distribution")
            top = tops[0]
            _give_to_root(top)
            if spec.bug is not None:
                _plant(top, spec.bug)
            return build_layer(
                top, out, prefix=spec.prefix, role=LayerRole.WORKSPACE, name=f"{spec.name}-{spec.version}"
            )
        except LayerError as error:
            raise BuildError(BuildReason.BAD_ARCHIVE, f"{source.name}: {error}") from error
        finally:
            remove_tree(tree)


def _give_to_root(tree: Path) -> None:
    """The archive's owners are those of whoever made it."""
    for directory, _, files, fd in os.fwalk(tree, follow_symlinks=False):
        del directory
        os.fchown(fd, 0, 0)
        for name in files:
            os.chown(name, 0, 0, dir_fd=fd, follow_symlinks=False)


def _plant(tree: Path, bug: PlantedBug) -> None:
    path = tree / bug.file
    if ".." in Path(bug.file).parts or not path.is_file() or path.is_symlink():
        raise BuildError(BuildReason.BAD_RECIPE, f"the source has no file {bug.file}")
    before = path.stat()
    text = path.read_text()
    broken = text.replace(bug.right, bug.wrong)
    if text.count(bug.right) != 1 or broken.count(bug.wrong) != 1:
        raise BuildError(BuildReason.BAD_RECIPE, f"the bug does not fit {bug.file}: its lines are not unique")
    path.write_text(broken)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
