"""The lifecycle rules that a bucket must have are the ones that the docs tell."""

from __future__ import annotations

import re
from pathlib import Path

from provisioner.blobs.s3_lifecycle import LIFECYCLE

DOCS = Path(__file__).parents[3] / "docs" / "s3.md"


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
