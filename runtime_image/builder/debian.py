"""A root filesystem of Debian packages, by mmdebstrap."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections import deque
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from pathlib import Path

from runtime_image.builder.errors import BuildError, BuildReason
from runtime_image.builder.progress import Progress
from runtime_image.builder.recipe import LoadedRecipe
from runtime_image.builder.sources import machine_apt_options, machine_sources
from runtime_image.layers import remove_tree
from runtime_image.layers.entries import Entry, Kind

# Documentation, translations and the like: nothing a program reads. Licences stay.
_UNPACKED_NEVER = (
    "/usr/share/man/*",
    "/usr/share/info/*",
    "/usr/share/doc/*",
    "/usr/share/locale/*",
    "/usr/share/lintian/*",
    "/usr/share/linda/*",
    "/usr/share/bug/*",
    "/usr/share/gtk-doc/*",
)
_UNPACKED_ANYWAY = ("/usr/share/doc/*/copyright",)

# Left on the build machine: logs, caches, backups of package tools, what names this machine or its
# mirrors. Directories whose content is listed here stay, empty.
_LEFT_OUT = re.compile(
    r"""(?:
        (?:dev|proc|sys|run|tmp|var/tmp)/.+
      | (?:var/cache/apt|var/cache/debconf|var/lib/apt/lists|var/lib/systemd)/.+
      | var/log/.+
      | var/cache/ldconfig/.+
      | var/lib/dpkg/(?:status|available|diversions|statoverride)-old
      | var/lib/dpkg/(?:lock|lock-frontend|triggers/Lock)
      | etc/(?:passwd|group|shadow|gshadow|subuid|subgid)-
      | etc/(?:machine-id|resolv\.conf|hostname|\.pwd\.lock)
      | etc/apt/sources\.list(?:\.d/.+)?
      | etc/apt/apt\.conf\.d/99mmdebstrap
      | usr/share/(?:man|info|locale|lintian|linda|bug|gtk-doc)/.+
      | usr/share/doc/[^/]+/(?!copyright$).+
      | root/\.(?:cache|bash_history|wget-hsts).*
    )""",
    re.VERBOSE,
)
_STANDARD_DIRECTORIES = {
    "dev": 0o755,
    "etc": 0o755,
    "proc": 0o755,
    "root": 0o700,
    "run": 0o755,
    "sys": 0o755,
    "tmp": 0o1777,
    "var": 0o755,
    "var/tmp": 0o1777,
}
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_FIRST_EPOCH_S = 1_672_531_200  # 2023-01-01, for what asks before the mirror's own date is known


def image_filter(exclude: tuple[str, ...] = ()) -> Callable[[Entry], bool]:
    """Tells what of a built root filesystem is part of the image.

    Args:
        exclude: Absolute paths to leave out, with all that is below them.
    """
    named = frozenset(path.strip("/") for path in exclude)

    def belongs(entry: Entry) -> bool:
        return (
            entry.path not in named
            and _LEFT_OUT.fullmatch(entry.path) is None
            and entry.kind not in (Kind.DEVICE, Kind.SOCKET)
        )

    return belongs


def bootstrap(loaded: LoadedRecipe, root: Path, work: Path, progress: Progress) -> int:
    """Builds the recipe's root filesystem at `root`, which must not exist.

    Args:
        work: A directory for what the build itself needs.

    Returns:
        The date of the mirror's newest index, seconds since 1970: with an unchanged mirror it stays
        the same, so that it can clamp the image's times.

    Raises:
        BuildError: A tool, a mirror, a package or a command failed.
    """
    _require_tools()
    recipe = loaded.recipe
    sources = machine_sources(recipe.suite)
    lists = work / "lists"
    lists.mkdir()
    listing = work / "sources.list"
    listing.write_text("".join(source.line() + "\n" for source in sources))
    overlay = work / "files"
    _lay_files(loaded, overlay)
    command = [
        "mmdebstrap",
        "--mode=root",
        f"--variant={recipe.variant}",
        "--format=directory",
        f"--include={','.join(sorted(recipe.packages))}",
        "--aptopt=APT::Install-Recommends false",
        "--aptopt=Acquire::Languages none",
        *[f"--aptopt={option}" for option in machine_apt_options()],
        *[f"--dpkgopt=path-exclude={pattern}" for pattern in _UNPACKED_NEVER],
        *[f"--dpkgopt=path-include={pattern}" for pattern in _UNPACKED_ANYWAY],
    ]
    if recipe.variant not in ("extract", "custom") and Path("/usr/share/mmdebstrap/hooks").is_dir():
        command.append("--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr")
    # mmdebstrap has no customize step for trees that are only extracted.
    hook = "--extract-hook" if recipe.variant == "extract" else "--customize-hook"
    command.append(f'{hook}=cp -r "$1"/var/lib/apt/lists/. {shlex.quote(str(lists))}/')
    # By tar, so that directories that are symlinks in the new root stay what they are.
    command.append(
        f"{hook}=tar -C {shlex.quote(str(overlay))} -c . | "
        'tar -C "$1" -x --no-overwrite-dir --keep-directory-symlink'
    )
    environment = " ".join(
        f"{key}={shlex.quote(value)}" for key, value in {"PATH": _PATH, **recipe.env}.items()
    )
    for said in recipe.commands:
        argv = shlex.join(["/bin/sh", "-ec", said] if isinstance(said, str) else said)
        command.append(f'{hook}=env -i {environment} HOME=/root chroot "$1" {argv}')
    command += [recipe.suite, str(root), str(listing)]
    _run(command, progress)
    return _newest_release(lists)


def packages_of(root: Path) -> dict[str, str]:
    """Installed package names and versions, from dpkg's own record; empty where there is none."""
    status = root / "var/lib/dpkg/status"
    if status.is_symlink() or not status.is_file():
        return {}
    found = {}
    for stanza in status.read_text(errors="replace").split("\n\n"):
        fields = dict(re.findall(r"^(Package|Version): (.*)$", stanza, re.MULTILINE))
        if "Package" in fields and "Version" in fields:
            found[fields["Package"]] = fields["Version"]
    return dict(sorted(found.items()))


def _lay_files(loaded: LoadedRecipe, into: Path) -> None:
    into.mkdir(mode=0o755)
    recipe = loaded.recipe
    if recipe.variant in ("extract", "custom"):  # else they come with Debian's base-files
        for path, mode in _STANDARD_DIRECTORIES.items():
            (into / path).mkdir(exist_ok=True)
            (into / path).chmod(mode)
    for path in [*recipe.directories, *([recipe.workdir] if recipe.workdir else [])]:
        (into / path.strip("/")).mkdir(parents=True, exist_ok=True)
    for path, (data, mode) in loaded.contents.items():
        target = into / path.strip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        target.chmod(mode)


def _require_tools() -> None:
    if os.geteuid() != 0:
        raise BuildError(BuildReason.MISSING_TOOL, "building from packages needs root: run as root")
    for tool in ("mmdebstrap", "apt-get", "tar"):
        if shutil.which(tool) is None:
            raise BuildError(BuildReason.MISSING_TOOL, f"{tool} is not installed: apt-get install {tool}")


def _run(command: list[str], progress: Progress) -> None:
    environment = {key: value for key, value in os.environ.items() if key.lower().endswith("_proxy")} | {
        "PATH": _PATH,
        "LC_ALL": "C.UTF-8",
        "SOURCE_DATE_EPOCH": str(_FIRST_EPOCH_S),
    }
    last: deque[str] = deque(maxlen=30)
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
        errors="replace",
    ) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                last.append(line.rstrip())
                if line.startswith("I: ") and "..." in line:
                    progress("bootstrap", step=line[3:].strip())
        except BaseException:
            process.terminate()  # it unmounts and removes what it made
            raise
    if process.returncode != 0:
        raise BuildError(BuildReason.PACKAGES_FAILED, "mmdebstrap failed:\n" + "\n".join(last))


def _newest_release(lists: Path) -> int:
    newest = _FIRST_EPOCH_S
    for path in [*lists.glob("*InRelease"), *lists.glob("*Release")]:
        match = re.search(r"^Date: (.+)$", path.read_text(errors="replace"), re.MULTILINE)
        if match:
            newest = max(newest, int(parsedate_to_datetime(match.group(1)).timestamp()))
    remove_tree(lists)
    return newest
