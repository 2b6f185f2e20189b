"""What an image build says when it fails."""

from __future__ import annotations

from enum import StrEnum


class BuildReason(StrEnum):
    """Why there is no image. Values appear in `--json-progress` and in events."""

    BAD_RECIPE = "bad_recipe"
    """The recipe file is wrong; the detail names the field."""
    MISSING_TOOL = "missing_tool"
    """A program of the machine is not installed, or this is not root."""
    NO_MIRROR = "no_mirror"
    """The machine's apt sources have no such suite."""
    PACKAGES_FAILED = "packages_failed"
    """mmdebstrap could not fetch or install the packages, or a command of the recipe failed."""
    PULL_FAILED = "pull_failed"
    """The registry or the archive did not give the image."""
    BAD_REFERENCE = "bad_reference"
    """What was given is no image reference: no registry was asked."""
    BAD_EXCLUDE = "bad_exclude"
    """A glob of what to leave out names nothing, or leads out."""
    BAD_ARCHIVE = "bad_archive"
    """What was given is no image and no root filesystem, or is hostile."""


class BuildError(Exception):
    """An image could not be made.

    Attributes:
        reason: For programs.
        detail: For people: what happened, with the tail of the tool's own words.
    """

    def __init__(self, reason: BuildReason, detail: str) -> None:
        super().__init__(f"{reason.value}: {detail}")
        self.reason = reason
        self.detail = detail
