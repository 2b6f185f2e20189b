"""Where this machine gets Debian packages from: an image is built from the same mirrors."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from runtime_image.builder.errors import BuildError, BuildReason

# What else belongs to a release: its updates and its security fixes.
_POCKETS = ("", "-updates", "-security", "/updates")
# Settings of the machine's apt without which its mirrors may not be reachable.
_KEPT_SETTINGS = re.compile(
    r'^(Acquire::(?:http|https)::[^ ]*|Acquire::Retries|Acquire::Check-Valid-Until) "(.*)";$'
)


@dataclass(frozen=True, kw_only=True)
class AptSource:
    """One archive, as apt's one-line format says it.

    Attributes:
        signed_by: Path of its keyring; None leaves it to mmdebstrap, which knows the distributions' own.
    """

    uri: str
    suite: str
    components: tuple[str, ...]
    signed_by: str | None

    def line(self) -> str:
        """The line for a sources.list."""
        options = f"[signed-by={self.signed_by}] " if self.signed_by else ""
        return f"deb {options}{self.uri} {self.suite} {' '.join(self.components)}"


def machine_suite(os_release: Path = Path("/etc/os-release")) -> str | None:
    """The release this machine runs, by its code name; None when it does not say."""
    try:
        match = re.search(r'^VERSION_CODENAME="?([a-z-]+)"?$', os_release.read_text(), re.MULTILINE)
    except OSError:
        return None
    return match.group(1) if match else None


def choose_suite(
    wanted: str, apt_dir: Path = Path("/etc/apt"), os_release: Path = Path("/etc/os-release")
) -> str:
    """The release to build from: the wanted one where the machine has a source of it, else its own.

    So an Ubuntu machine builds the same packages from its own archive, and needs no mirror it was not
    given.

    Raises:
        BuildError: `no_mirror`: it has a source of neither.
    """
    try:
        machine_sources(wanted, apt_dir)
    except BuildError:
        own = machine_suite(os_release)
        if own is None or own == wanted:
            raise
        machine_sources(own, apt_dir)
        return own
    return wanted


def machine_sources(suite: str, apt_dir: Path = Path("/etc/apt")) -> list[AptSource]:
    """The machine's sources that offer a Debian release, its updates and security fixes.

    Raises:
        BuildError: `no_mirror`: it has none.
    """
    wanted = {suite + pocket for pocket in _POCKETS}
    found: list[AptSource] = []
    for path in [apt_dir / "sources.list", *sorted((apt_dir / "sources.list.d").glob("*"))]:
        if not path.is_file():
            continue
        text = path.read_text(errors="replace")
        parsed = _deb822(text) if path.suffix == ".sources" else _one_line(text)
        found += [source for source in parsed if source.suite in wanted and "main" in source.components]
    unique = list(dict.fromkeys(found))
    if not any(source.suite == suite for source in unique):
        raise BuildError(
            BuildReason.NO_MIRROR,
            f"no source of {suite} in {apt_dir}: add one for Debian {suite} to {apt_dir}/sources.list.d",
        )
    return unique


def machine_apt_options() -> list[str]:
    """Proxies and the like from the machine's apt configuration, as apt options."""
    if shutil.which("apt-config") is None:
        return []
    dump = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=False).stdout
    options = []
    for line in dump.splitlines():
        match = _KEPT_SETTINGS.match(line)
        if match and match.group(2):
            options.append(f'{match.group(1)} "{match.group(2)}"')
    return options


def _one_line(text: str) -> list[AptSource]:
    sources = []
    for line in text.splitlines():
        match = re.match(r"^\s*deb\s+(?:\[([^\]]*)\]\s+)?(\S+)\s+(\S+)\s+([^#]+)", line)
        if match is None:
            continue
        options, uri, suite, components = match.groups()
        signed_by = None
        for option in (options or "").split():
            key, _, value = option.partition("=")
            if key.lower() == "signed-by":
                signed_by = value
        sources.append(
            AptSource(
                uri=uri,
                suite=suite,
                components=tuple(components.split()),
                signed_by=signed_by,
            )
        )
    return sources


def _deb822(text: str) -> list[AptSource]:
    sources = []
    without_comments = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for stanza in re.split(r"\n\s*\n", without_comments):
        fields: dict[str, str] = {}
        key = ""
        for line in stanza.splitlines():
            if line[:1].isspace() and key:
                fields[key] += " " + line.strip()
            elif ":" in line:
                key, _, value = line.partition(":")
                key = key.strip().lower()
                fields[key] = value.strip()
        if "deb" not in fields.get("types", "").split() or fields.get("enabled", "yes").lower() == "no":
            continue
        signed_by = fields.get("signed-by")
        if signed_by is not None and not signed_by.startswith("/"):
            signed_by = None  # a key spelled out in place cannot be passed on in one line
        for uri in fields.get("uris", "").split():
            for suite in fields.get("suites", "").split():
                sources.append(
                    AptSource(
                        uri=uri,
                        suite=suite,
                        components=tuple(fields.get("components", "").split()),
                        signed_by=signed_by,
                    )
                )
    return sources
