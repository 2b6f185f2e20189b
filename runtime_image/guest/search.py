"""Listing and searching trees. In helpers only: both may take long and be told to stop."""

from __future__ import annotations

import os
import stat

from .files import describe, open_regular, path_of
from .workers import Sink, Source, bad

TYPE_CHECKING = False
if TYPE_CHECKING:
    import re
    from collections.abc import Iterator
    from typing import Any

_ENTRIES = 10_000
_MATCHES = 1_000
_LINE_BYTES = 2_000
_FILE_LIMIT = 64 << 20
_BINARY_PROBE = 8 << 10
# Not searched from outside: not files, and reading some of them does things.
_NOT_FILES = (b"/proc", b"/sys", b"/dev")


def list_files(request: dict[str, Any], sink: Sink, source: Source) -> dict[str, Any]:
    """Entries below `path` down to `depth` (1: its own), sorted; or the file that `path` is."""
    path, depth = path_of(request), request.get("depth")
    depth = 1 if depth is None else int(depth)
    room = int(request.get("max_entries") or _ENTRIES)
    glob = _glob(request.get("glob"))
    info = os.stat(path)
    if not stat.S_ISDIR(info.st_mode):
        sink.item(_entry(path, os.lstat(path)))
        return {"truncated": False, "skipped": 0}
    skipped = [0]
    for relative, entry in _walk(path, depth, skipped):
        if glob is not None and not glob.match(relative):
            continue
        if room <= 0:
            return {"truncated": True, "skipped": skipped[0]}
        room -= 1
        try:
            sink.item(_entry(_join(path, relative), entry.stat(follow_symlinks=False)))
        except OSError:
            # Gone since the directory was read.
            continue
    return {"truncated": False, "skipped": skipped[0]}


def search(request: dict[str, Any], sink: Sink, source: Source) -> dict[str, Any]:
    """Lines that match `pattern` (a regular expression, on text) in the regular files below `path`.

    Binary files (a NUL near the start), files over 64 MiB and what cannot be read are skipped and
    counted; symlinks are not followed.
    """
    import re

    path = path_of(request)
    room = int(request.get("max_results") or _MATCHES)
    glob = _glob(request.get("glob"))
    flags = re.IGNORECASE if request.get("ignore_case") else 0
    wanted = request["pattern"]
    if request.get("literal"):
        wanted = re.escape(wanted)
    try:
        pattern = re.compile(wanted, flags)
        # Without assertions that look around, a line that matches alone also matches in its text.
        plain = "(?" not in wanted and "\\A" not in wanted and "\\Z" not in wanted
        prefilter = re.compile(wanted, flags | re.MULTILINE) if plain else None
    except (re.error, RecursionError, OverflowError) as err:
        raise bad(f"not a regular expression: {err}") from None
    counts = {"files": 0, "skipped": 0}
    info = os.stat(path)
    skipped = [0]
    found: Iterator[tuple[bytes, bytes]]
    if stat.S_ISDIR(info.st_mode):
        found = (
            (r, _join(path, r))
            for r, entry in _walk(path, None, skipped)
            if entry.is_file(follow_symlinks=False)
        )
    else:
        found = iter([(os.path.basename(path), path)])
    for relative, file in found:
        if glob is not None and not glob.match(relative):
            continue
        for number, line in _matches(file, pattern, prefilter, counts):
            if room <= 0:
                return {"truncated": True, **counts}
            room -= 1
            text = line.encode("utf-8", "surrogateescape")
            sink.item(
                {"path": file, "line": number, "text": text[:_LINE_BYTES], "cut": len(text) > _LINE_BYTES}
            )
    counts["skipped"] += skipped[0]
    return {"truncated": False, **counts}


def _matches(
    path: bytes, pattern: re.Pattern[str], prefilter: re.Pattern[str] | None, counts: dict[str, int]
) -> Iterator[tuple[int, str]]:
    try:
        fd, info = open_regular(path)
    except OSError:
        counts["skipped"] += 1
        return
    try:
        with os.fdopen(fd, "rb", buffering=0) as file:
            probe = b"" if info.st_size > _FILE_LIMIT else file.read(_BINARY_PROBE)
            if info.st_size > _FILE_LIMIT or b"\0" in probe:
                counts["skipped"] += 1
                return
            data = probe + (file.read(_FILE_LIMIT) if len(probe) == _BINARY_PROBE else b"")
    except OSError:
        counts["skipped"] += 1
        return
    counts["files"] += 1
    # A carriage return before a line end is part of the end, so that `$` means what people mean.
    text = data.decode("utf-8", "surrogateescape").replace("\r\n", "\n")
    if prefilter is not None and prefilter.search(text) is None:
        return
    for number, line in enumerate(text.split("\n"), 1):
        if pattern.search(line) is not None:
            yield number, line


def _walk(root: bytes, depth: int | None, skipped: list[int]) -> Iterator[tuple[bytes, os.DirEntry[bytes]]]:
    """Depth first, names sorted, without following symlinks; explicit stack: trees may be deep."""
    outside = [os.stat(path).st_dev for path in _NOT_FILES if os.path.isdir(path)]
    if os.stat(root).st_dev in outside:
        outside = []
    stack: list[Iterator[tuple[bytes, os.DirEntry[bytes]]]] = [iter(_children(root, b"", skipped))]
    while stack:
        step = next(stack[-1], None)
        if step is None:
            stack.pop()
            continue
        relative, entry = step
        yield relative, entry
        if depth is not None and len(stack) >= depth:
            continue
        try:
            if not entry.is_dir(follow_symlinks=False):
                continue
            if outside and entry.stat(follow_symlinks=False).st_dev in outside:
                continue
        except OSError:
            continue
        stack.append(iter(_children(entry.path, relative + b"/", skipped)))


def _children(path: bytes, prefix: bytes, skipped: list[int]) -> list[tuple[bytes, os.DirEntry[bytes]]]:
    try:
        with os.scandir(path) as entries:
            return sorted(((prefix + entry.name, entry) for entry in entries), key=lambda item: item[0])
    except OSError:
        if not prefix:
            raise
        skipped[0] += 1
        return []


def _entry(path: bytes, info: os.stat_result) -> dict[str, Any]:
    target = None
    if stat.S_ISLNK(info.st_mode):
        try:
            target = os.readlink(path)
        except OSError:
            pass
    return {"path": path, **describe(info), "link_target": target}


def _join(root: bytes, relative: bytes) -> bytes:
    return relative if root in (b".", b"./") else root.rstrip(b"/") + b"/" + relative


def _glob(glob: str | None) -> re.Pattern[bytes] | None:
    """As in .gitignore: with a slash it is for the whole path, without for the last name."""
    if not glob:
        return None
    import re

    anchored = "/" in glob.strip("/")
    parts: list[str] = []
    text = glob.strip("/")
    at = 0
    while at < len(text):
        char = text[at]
        if text.startswith("**/", at):
            parts.append("(?:.*/)?")
            at += 3
        elif text.startswith("**", at):
            parts.append(".*")
            at += 2
        elif char == "*":
            parts.append("[^/]*")
            at += 1
        elif char == "?":
            parts.append("[^/]")
            at += 1
        elif char == "{" and "}" in text[at:]:
            end = text.index("}", at)
            options = [re.escape(option).replace(r"\*", "[^/]*") for option in text[at + 1 : end].split(",")]
            parts.append(f"(?:{'|'.join(options)})")
            at = end + 1
        elif char == "[" and "]" in text[at + 2 :]:
            end = text.index("]", at + 2)
            body = text[at + 1 : end].replace("\\", "\\\\")
            parts.append(f"[{'^' + body[1:] if body[0] == '!' else body}]")
            at = end + 1
        else:
            parts.append(re.escape(char))
            at += 1
    prefix = "" if anchored else "(?:.*/)?"
    try:
        return re.compile(os.fsencode(f"{prefix}{''.join(parts)}\\Z"), re.DOTALL)
    except re.error as err:
        raise bad(f"not a glob: {err}") from None
