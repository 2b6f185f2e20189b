"""Images really built from the machine's package mirrors, and what runs in them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime_image.builder import BuildError, BuildReason, ImageLayer, ImageManifest, blob_name, build_recipe
from runtime_image.builder.workspace import build_workspace, fetch_source, load_workspace
from runtime_image.layers import remove_tree, unpack

ROOM = Path(__file__).parents[3]
IMAGES = ROOM / "runtime_image/images"
SPEC = ROOM / "examples/workspaces/toolz.toml"

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(shutil.which("mmdebstrap") is None, reason="mmdebstrap is not installed"),
]


def unpacked(layer: ImageLayer, blobs: Path, into: Path) -> Path:
    """One layer of an image as a directory."""
    blob = blobs / blob_name(layer.digest)
    unpack(blob, into, max_bytes=layer.uncompressed_bytes, expect_digest=layer.digest)
    return into


# In a mount namespace of its own, so that nothing is left mounted whatever happens.
_IN_ROOT = """
set -e
mount -t overlay overlay -o "lowerdir=$1,upperdir=$2/upper,workdir=$2/work" "$2/root"
mount --rbind /dev "$2/root/dev"
mount -t proc proc "$2/root/proc"
root="$2/root"
shift 2
exec chroot "$root" "$@"
"""


class Room:
    """A root over some layers, to run programs in: no sandbox, but without network or other processes."""

    def __init__(self, layers: list[Path], at: Path) -> None:
        self._lower = ":".join(str(layer) for layer in reversed(layers))
        self._at = at
        for name in ("upper", "work", "root"):
            (at / name).mkdir(parents=True)
        self.upper = at / "upper"

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        isolated = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child"]
        return subprocess.run(
            [*isolated, "sh", "-c", _IN_ROOT, "sh", self._lower, self._at, *argv],
            env={"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/root", "LANG": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )


def test_minimal_is_busybox_and_nothing_else(tmp_path: Path) -> None:
    """Under 5 MB; a shell that works; no Python, no bash; nothing of the build machine or its mirror."""
    manifest = build_recipe(IMAGES / "minimal.toml", tmp_path / "out")
    assert sum(layer.uncompressed_bytes for layer in manifest.layers) < 5_000_000
    root = unpacked(manifest.layers[0], tmp_path / "out", tmp_path / "layer")
    done = Room([root], tmp_path / "room").run("/bin/sh", "-c", "echo hello | tr a-z A-Z; id -un; ls /; pwd")
    assert (done.returncode, done.stdout.splitlines()[:2]) == (0, ["HELLO", "root"])
    assert "workspace" in done.stdout
    assert not [name for name in ("bash", "python3") if list(root.rglob(name))]
    assert not (root / "etc/resolv.conf").exists()
    assert not (root / "etc/hostname").exists()
    assert not list(root.rglob("sources.list*"))
    assert (root / "tmp").stat().st_mode & 0o7777 == 0o1777


def test_the_same_recipe_gives_the_same_image(tmp_path: Path) -> None:
    """Two builds are byte for byte the same; a third comes from the cache without building."""
    cache = tmp_path / "cache"
    first = build_recipe(IMAGES / "minimal.toml", tmp_path / "one", cache=cache)
    phases: list[str] = []
    second = build_recipe(
        IMAGES / "minimal.toml",
        tmp_path / "two",
        cache=cache,
        rebuild=True,
        progress=lambda phase, **_: phases.append(phase),
    )
    assert second == first
    assert phases[0] == "bootstrap"
    phases.clear()
    third = build_recipe(
        IMAGES / "minimal.toml",
        tmp_path / "three",
        cache=cache,
        progress=lambda phase, **_: phases.append(phase),
    )
    assert third == first
    assert phases == ["cached"]
    assert (tmp_path / "three" / blob_name(first.layers[0].digest)).stat().st_size == first.layers[
        0
    ].size_bytes


@pytest.mark.parametrize(
    "change",
    [
        'packages = ["no-such-package-anywhere"]',
        'packages = ["busybox-static"]\ncommands = [["/bin/busybox", "false"]]',
    ],
    ids=["an unknown package", "a failing command"],
)
def test_a_failed_build_says_why_and_leaves_nothing(tmp_path: Path, change: str) -> None:
    """A typed reason with the tool's own words, no manifest, no mount."""
    recipe = tmp_path / "bad.toml"
    recipe.write_text(f'name = "bad"\ntag = "1"\nvariant = "extract"\n{change}\n')
    with pytest.raises(BuildError) as failed:
        build_recipe(recipe, tmp_path / "out", cache=tmp_path / "cache")
    assert failed.value.reason is BuildReason.PACKAGES_FAILED
    assert "busybox false" in failed.value.detail or "no-such-package" in failed.value.detail
    assert list((tmp_path / "out").iterdir()) == []
    assert "shoal-build-" not in Path("/proc/self/mounts").read_text()


def test_the_command_line_speaks_json(tmp_path: Path) -> None:
    """One object on standard output; progress as JSON lines; a failure exits with 1 and its reason."""

    def call(recipe: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "runtime_image.builder", "build", "--json-progress"]
        return subprocess.run(
            [*command, "--recipe", recipe, "--out", tmp_path / "out"],
            cwd=ROOM,
            capture_output=True,
            text=True,
            check=False,
        )

    good = call(IMAGES / "minimal.toml")
    assert good.returncode == 0
    said = json.loads(good.stdout)
    assert said["digest"] == ImageManifest.load(tmp_path / "out").digest
    assert [json.loads(line)["phase"] for line in good.stderr.splitlines()][-1] == "done"
    bad = call(tmp_path / "none.toml")
    assert (bad.returncode, bad.stdout) == (1, "")
    assert json.loads(bad.stderr.splitlines()[-1])["reason"] == "bad_recipe"


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The code image, built once; its blobs and manifest in `out`, its layer in `layer`."""
    room = tmp_path_factory.mktemp("code")
    manifest = build_recipe(IMAGES / "code.toml", room / "out")
    unpacked(manifest.layers[0], room / "out", room / "layer")
    yield room
    remove_tree(room)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_code_runs_what_agents_run(code: Path, tmp_path: Path) -> None:
    """Python with its packages, both C compilers, git, ripgrep, UTF-8: each does real work."""
    script = """
        set -e
        python3 -c 'import numpy, pandas; print(pandas.DataFrame({"a": numpy.arange(4)})["a"].sum())'
        cd /workspace
        printf '#include <cstdio>\\nint main() { puts("compiled"); }' > a.cc
        g++ a.cc -o a && ./a && clang++ a.cc -o b && ./b
        printf 'all:\\n\\t@echo made\\n' > Makefile && make
        git init -q . && git add . && git -c user.name=n -c user.email=e@example.org commit -qm one
        git log --format=%s && rg -l compiled && python3 -m pytest --version && jq -n '1+1'
        python3 -c 'import locale; print(locale.getpreferredencoding())'
        curl --version > /dev/null && less --version > /dev/null && ps --version > /dev/null
    """
    done = Room([code / "layer"], tmp_path / "room").run("/bin/bash", "-c", script)
    assert done.stderr == ""
    assert done.returncode == 0
    said = done.stdout.split()
    assert said[:4] == ["6", "compiled", "compiled", "made"]
    assert said[-1].upper() == "UTF-8"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_workspace_fails_where_it_says_and_one_edit_heals_it(code: Path, tmp_path: Path) -> None:
    """With the bug planted exactly the named tests fail; putting the line back makes all pass."""
    spec = load_workspace(SPEC)
    assert spec.bug is not None
    source = fetch_source(spec, ROOM / "requirements/workspace.txt", tmp_path)
    layer = build_workspace(spec, source, code / "out")
    workspace = unpacked(layer, code / "out", tmp_path / "workspace")
    room = Room([code / "layer", workspace], tmp_path / "room")

    def failing() -> set[str]:
        done = room.run("/bin/bash", "-c", f"cd {spec.prefix} && {spec.test_command} -rf")
        assert "passed" in done.stdout, done.stdout + done.stderr
        return {line.split()[1] for line in done.stdout.splitlines() if line.startswith("FAILED ")}

    assert failing() == set(spec.bug.failing_tests)
    path = workspace / spec.prefix.strip("/") / spec.bug.file
    assert path.stat().st_uid == 0
    text = path.read_text()
    assert text.count(spec.bug.wrong) == 1
    path.write_text(text.replace(spec.bug.wrong, spec.bug.right))
    assert failing() == set()
