"""What can go wrong with a layer, split by what the caller does next.

    LayerError
    ├── LayerRefused      the input is hostile or malformed: do not use it
    │   └── DigestMismatch    the bytes are not those the digest names: fetch again
    ├── TreeChanged       a file changed while it was read: freeze the writer, try again
    ├── TreeUnsupported   the tree holds something a layer cannot say
    └── ParentMismatch    the tree does not descend from that index: pack it whole

Errors of the machine itself (disk full, input/output) stay `OSError`.
"""

from __future__ import annotations


class LayerError(Exception):
    """Base of everything this package raises on purpose."""


class LayerRefused(LayerError):
    """A blob that is malformed, too large or tries to leave its directory.

    Attributes:
        reason: One sentence for an operator.
        path: The entry at fault, as the blob names it; None when no single entry is.
    """

    def __init__(self, reason: str, path: str | None = None) -> None:
        super().__init__(reason if path is None else f"{reason}: {path[:200]!r}")
        self.reason = reason
        self.path = path


class DigestMismatch(LayerRefused):
    """The blob's bytes are not those its digest names."""

    def __init__(self, expected: str, actual: str) -> None:
        super().__init__(f"expected {expected}, got {actual}")
        self.expected = expected
        self.actual = actual


class TreeChanged(LayerError):
    """A file grew, shrank or vanished while it was read."""


class TreeUnsupported(LayerError):
    """The tree holds what a layer cannot say (overlay redirects, endless paths)."""


class ParentMismatch(LayerError):
    """The difference to that parent cannot be said with whiteouts; pack the tree whole."""
