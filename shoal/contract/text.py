"""Bytes of a sandbox as the wire carries them: UTF-8 with replacement and a flag, or base64."""

from __future__ import annotations

import base64

from shoal.contract.actions import Encoding


def to_text(data: bytes, encoding: Encoding) -> tuple[str, bool]:
    """(text, lossy). Base64 is never lossy."""
    if encoding == "base64":
        return base64.b64encode(data).decode("ascii"), False
    try:
        return data.decode("utf-8"), False
    except UnicodeDecodeError:
        return data.decode("utf-8", "replace"), True


def to_bytes(text: str, encoding: Encoding) -> bytes:
    """The bytes that a text field stands for.

    Raises:
        ValueError: It says base64 and is not.
    """
    if encoding == "base64":
        return base64.b64decode(text, validate=True)
    return text.encode("utf-8", "surrogatepass")


def whole_utf8(data: bytes) -> int:
    """How many bytes of `data` end with a whole character: all, or up to 3 fewer when one is cut at the end."""
    for back in range(1, min(4, len(data) + 1)):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        needed = 2 if byte >> 5 == 0b110 else 3 if byte >> 4 == 0b1110 else 4 if byte >> 3 == 0b11110 else 1
        return len(data) - back if needed > back else len(data)
    return len(data)
