"""The bill of materials says what there is, the same each time."""

from __future__ import annotations

import json
from importlib.metadata import distributions

from runtime_image.image.sbom import bill_of_materials, debian_components, python_components

LISTING = (
    "runc\t1.1.5+ds1-1\tamd64\tinstalled\nlibc6:amd64\t2.36-9\tamd64\tinstalled\nold\t1\tall\tconfig-files\n"
)


def test_debian_packages_are_named_as_scanners_look_them_up() -> None:
    """Package URLs with escaped versions; what is not installed is left out."""
    found = {each["name"]: each["purl"] for each in debian_components(LISTING, "debian-12")}
    assert found == {
        "runc": "pkg:deb/debian/runc@1.1.5%2Bds1-1?arch=amd64&distro=debian-12",
        "libc6": "pkg:deb/debian/libc6@2.36-9?arch=amd64&distro=debian-12",
    }


def test_python_packages_come_with_name_version_and_licence() -> None:
    """Of what this very environment has, pydantic for one."""
    found = {each["name"]: each for each in python_components(distributions())}
    pydantic = found["pydantic"]
    assert pydantic["purl"] == f"pkg:pypi/pydantic@{pydantic['version']}"
    assert all(each["version"] for each in found.values())


def test_the_document_is_whole_and_the_same_each_time() -> None:
    """CycloneDX's required fields, references that are unique, no time and no chance in it."""
    components = [*debian_components(LISTING, "debian-12"), *python_components(distributions())]
    document = bill_of_materials([*components, components[0]], name="shoal-agent")
    assert document == bill_of_materials(list(reversed(components)), name="shoal-agent")
    assert (document["bomFormat"], document["specVersion"], document["version"]) == ("CycloneDX", "1.6", 1)
    references = [each["bom-ref"] for each in document["components"]]
    assert references == sorted(set(references))
    assert document["serialNumber"].startswith("urn:uuid:")
    less = bill_of_materials(components[1:], name="shoal-agent")
    assert less["serialNumber"] != document["serialNumber"]
    json.dumps(document)
