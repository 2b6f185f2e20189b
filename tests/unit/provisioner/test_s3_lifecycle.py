"""The lifecycle rules that a bucket must have are the ones that the docs tell."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from provisioner.blobs.s3_lifecycle import LIFECYCLE, LifecycleRule

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs" / "s3.md"
BUCKET = ROOT / "infra" / "modules" / "state" / "bucket.tf"


def test_the_docs_name_every_rule() -> None:
    """Id, prefix and days of each, and no rule more."""
    rows = re.findall(r"^\| `([a-z-]+)` \| (.+?) \| (.+?) \|", DOCS.read_text(), flags=re.MULTILINE)
    told = {id: (prefix.strip("`"), re.findall(r"\d+", days)) for id, prefix, days in rows}
    wanted = {
        rule.id: (
            rule.prefix or "everything",
            [
                str(days)
                for days in (rule.expire_days, rule.abort_multipart_days, rule.noncurrent_days)
                if days is not None
            ],
        )
        for rule in LIFECYCLE
    }
    assert told == wanted


@pytest.mark.parametrize("rule", LIFECYCLE, ids=lambda rule: rule.id)
def test_terraform_sets_every_rule(rule: LifecycleRule) -> None:
    """With the same prefix and the same days."""
    text = BUCKET.read_text()
    found = re.search(rf'id\s*= "{rule.id}"(.*?)\n(?=\n  (?:rule|dynamic)|}}\n)', text, flags=re.DOTALL)
    assert found is not None, "there is no such rule"
    block = found[1]
    prefix = re.search(r'prefix\s*= "([^"]*)"', block)
    assert (prefix[1] if prefix else "") == rule.prefix

    def days(name: str, inside: str) -> int | None:
        number = re.search(rf"{inside} \{{\s*{name}\s*= (\d+)", block)
        return int(number[1]) if number else None

    assert days("days", "expiration") == rule.expire_days
    assert days("days_after_initiation", "abort_incomplete_multipart_upload") == rule.abort_multipart_days
    assert days("noncurrent_days", "noncurrent_version_expiration") == rule.noncurrent_days
