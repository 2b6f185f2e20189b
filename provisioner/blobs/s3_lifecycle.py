"""What a bucket's lifecycle must take away, since nobody else does. Terraform and `docs/s3.md` say the same (tests)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LifecycleRule:
    """One rule of a bucket's lifecycle. Prefixes are behind the bucket's own (`SHOAL_AWS_BLOB_PREFIX`).

    Attributes:
        expire_days: Objects go so many days after they were made; None: never.
        abort_multipart_days: Unfinished multipart uploads go so many days after they began; None: never.
        noncurrent_days: In a bucket with versions, what was replaced or deleted goes after so many days; None: never.
        why: For people.
    """

    id: str
    prefix: str
    expire_days: int | None = None
    abort_multipart_days: int | None = None
    noncurrent_days: int | None = None
    why: str


#: Days are S3's smallest unit; it acts within a day or so after them, and nothing here depends on when.
LIFECYCLE = (
    LifecycleRule(
        id="transfers",
        prefix="transfers/",
        expire_days=1,
        why="Files on their way in or out of sessions: good for an hour, then garbage.",
    ),
    LifecycleRule(
        id="unfinished-uploads",
        prefix="",
        abort_multipart_days=1,
        why="Parts of uploads whose writer died before it could abort them; they are paid for and seen by no list.",
    ),
    LifecycleRule(
        id="old-versions",
        prefix="",
        noncurrent_days=1,
        why="Only where the bucket keeps versions (Object Lock needs that): deleted snapshots would be paid for on.",
    ),
)
