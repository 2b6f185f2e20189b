"""What the image is made of, as CycloneDX 1.6 JSON: Debian packages from dpkg, Python packages from their metadata.

Run while the image is built; the file is at `/opt/shoal/sbom.cdx.json` in it. The same packages give the same bytes:
no time, no random serial number.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import uuid
from collections.abc import Iterable, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any
from urllib.parse import quote

_FORMAT = "${binary:Package}\t${Version}\t${Architecture}\t${db:Status-Status}\n"
#: Makes the serial number of the same content the same one.
_NAMESPACE = uuid.UUID("5b9f8f5e-6a5d-5b7e-9d0f-7f7a5c2c9c11")

Component = dict[str, Any]


def debian_components(listing: str, distribution: str) -> list[Component]:
    """Of `dpkg-query`'s lines of package, version, architecture and status.

    Args:
        distribution: `debian-12`: which archive's packages these are.
    """
    found = []
    for line in listing.splitlines():
        name, version, architecture, status = line.split("\t")
        if status != "installed":
            continue
        name = name.partition(":")[0]
        purl = (
            f"pkg:deb/debian/{quote(name, safe='')}@{quote(version, safe='')}"
            f"?arch={architecture}&distro={distribution}"
        )
        found.append({"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl})
    return found


def python_components(found: Iterable[Distribution]) -> list[Component]:
    """Of installed distributions, with the licence they state."""
    components = []
    for distribution in found:
        name, version = distribution.metadata["Name"], distribution.version
        purl = f"pkg:pypi/{quote(name.lower().replace('_', '-'), safe='')}@{quote(version, safe='')}"
        component: Component = {
            "type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl,
        }  # fmt: skip
        if "License-Expression" in distribution.metadata:
            component["licenses"] = [{"expression": distribution.metadata["License-Expression"]}]
        components.append(component)
    return components


def bill_of_materials(components: Sequence[Component], *, name: str) -> dict[str, Any]:
    """The document; components in order of their name, each once."""
    each = {component["bom-ref"]: component for component in components}
    ordered = [each[ref] for ref in sorted(each)]
    serial = uuid.uuid5(_NAMESPACE, json.dumps(ordered, sort_keys=True))
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {"component": {"type": "container", "bom-ref": name, "name": name}},
        "components": ordered,
    }


def _distribution(os_release: str) -> str:
    values = dict(line.partition("=")[::2] for line in os_release.splitlines() if "=" in line)
    return f"{values.get('ID', 'debian')}-{values.get('VERSION_ID', '')}".replace('"', "")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m runtime_image.image.sbom", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    parser.add_argument("--name", default="shoal-agent", help="what the whole is called")
    options = parser.parse_args(argv)
    listing = subprocess.run(
        ["dpkg-query", "-W", "-f", _FORMAT], check=True, capture_output=True, text=True
    ).stdout
    components = [
        *debian_components(listing, _distribution(Path("/etc/os-release").read_text())),
        *python_components(distributions()),
    ]
    options.out.write_text(json.dumps(bill_of_materials(components, name=options.name), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
