"""Editing by replacement: never a guess. In helpers only."""

from __future__ import annotations

import os
from errno import EFBIG

from .files import Replacement, describe, open_regular, path_of
from .workers import Sink, Source, bad, write_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_FILE_LIMIT = 16 << 20
_CONTEXT = 3
_DIFF_LIMIT = 48 << 10
_NEAR = 5
_NEAR_TEXT = 2000
# Lines compared for likeness when nothing matches; beyond, only exact likeness counts.
_FUZZY_LINES = 5000


def edit(request: dict[str, Any], sink: Sink, source: Source) -> dict[str, Any]:
    """Replace `old` by `new` when it occurs exactly `occurrences` times (None: once or more).

    Otherwise nothing is written, and the result has `replacements` 0, the count found, and where,
    or the lines most like what was looked for.
    """
    old, new = _bytes(request["old"]), _bytes(request["new"])
    wanted = request.get("occurrences", 1)
    if not old:
        raise bad("old is empty")
    path = path_of(request)
    fd, info = open_regular(path)
    with os.fdopen(fd, "rb") as file:
        if info.st_size > _FILE_LIMIT:
            raise OSError(EFBIG, f"edits are for files of at most {_FILE_LIMIT} bytes", path)
        text = file.read(_FILE_LIMIT + 1)
    spots = _find(text, old)
    if not spots or (wanted is not None and len(spots) != wanted):
        near = [_near(text, at, len(old)) for at in spots[:_NEAR]] if spots else _alike(text, old)
        return {"replacements": 0, "matches": len(spots), "near": near}
    if old == new:
        return {**describe(info), "replacements": len(spots), "matches": len(spots), "diff": b""}
    changed = text.replace(old, new)
    target = Replacement(path, mode=None, owner=None, create_parents=False)
    try:
        write_all(target.fd, changed)
    except BaseException:
        target.abort()
        raise
    diff = _diff(path, text, spots, len(old), new)
    return {
        **describe(target.commit()),
        "replacements": len(spots),
        "matches": len(spots),
        "diff": diff[:_DIFF_LIMIT],
        "diff_truncated": len(diff) > _DIFF_LIMIT,
    }


def _bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")


def _find(text: bytes, old: bytes) -> list[int]:
    spots = []
    at = text.find(old)
    while at >= 0:
        spots.append(at)
        at = text.find(old, at + len(old))
    return spots


def _near(text: bytes, at: int, size: int) -> dict[str, Any]:
    start = text.rfind(b"\n", 0, at) + 1
    end = text.find(b"\n", at + size)
    end = len(text) if end < 0 else end
    return {"line": text.count(b"\n", 0, start) + 1, "text": text[start:end][:_NEAR_TEXT]}


def _alike(text: bytes, old: bytes) -> list[dict[str, Any]]:
    """Blocks of as many lines as `old` has whose telling line is most like its own."""
    wanted = old.strip(b"\n").split(b"\n")
    telling = max(range(len(wanted)), key=lambda number: len(wanted[number].strip()))
    needle = wanted[telling].strip()
    lines = text.split(b"\n")
    scored = [(1.0, number) for number, line in enumerate(lines) if needle and line.strip() == needle]
    if not scored and needle:
        from difflib import SequenceMatcher

        matcher = SequenceMatcher(autojunk=False)
        matcher.set_seq2(needle.decode("utf-8", "replace")[:500])
        for number, line in enumerate(lines[:_FUZZY_LINES]):
            matcher.set_seq1(line.strip().decode("utf-8", "replace")[:500])
            if matcher.real_quick_ratio() > 0.6 and matcher.quick_ratio() > 0.6:
                ratio = matcher.ratio()
                if ratio > 0.6:
                    scored.append((ratio, number))
    scored.sort(key=lambda item: (-item[0], item[1]))
    near = []
    for _, number in scored[:_NEAR]:
        first = max(0, number - telling)
        block = b"\n".join(lines[first : first + len(wanted)])
        near.append({"line": first + 1, "text": block[:_NEAR_TEXT]})
    return near


def _diff(path: bytes, text: bytes, spots: list[int], size: int, new: bytes) -> bytes:
    """A unified diff. What changed is known, so nothing is searched for."""
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    # Runs of old lines that a replacement touches: [first, last], with the new text of each.
    runs: list[tuple[int, int, list[int]]] = []
    line_number = 0
    for at in spots:
        while starts[line_number + 1] <= at:
            line_number += 1
        last = line_number
        while starts[last + 1] < at + size:
            last += 1
        if starts[last + 1] == at + size and not new.endswith(b"\n") and last + 1 < len(lines):
            # The line end went: the next line joins this one.
            last += 1
        if runs and runs[-1][1] >= line_number:
            first, before, held = runs[-1]
            runs[-1] = (first, max(before, last), [*held, at])
        else:
            runs.append((line_number, last, [at]))
    out = [b"--- a/" + path.lstrip(b"/") + b"\n", b"+++ b/" + path.lstrip(b"/") + b"\n"]
    shift = 0
    for group in _groups(runs):
        first = max(0, group[0][0] - _CONTEXT)
        end = min(len(lines), group[-1][1] + 1 + _CONTEXT)
        body: list[bytes] = []
        at_line, added = first, 0
        for start, last, held in group:
            body += [b" " + line for line in lines[at_line:start]]
            added += start - at_line
            body += [b"-" + line for line in lines[start : last + 1]]
            begin, stop = starts[start], starts[last + 1]
            pieces, position = [], begin
            for spot in held:
                pieces += [text[position:spot], new]
                position = spot + size
            fresh = (b"".join(pieces) + text[position:stop]).splitlines(keepends=True)
            body += [b"+" + line for line in fresh]
            added += len(fresh)
            at_line = last + 1
        body += [b" " + line for line in lines[at_line:end]]
        added += end - at_line
        removed = end - first
        out.append(
            b"@@ -%d,%d +%d,%d @@\n" % (first + (removed > 0), removed, first + shift + (added > 0), added)
        )
        out += [line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n" for line in body]
        shift += added - removed
    return b"".join(out)


def _groups(runs: list[tuple[int, int, list[int]]]) -> list[list[tuple[int, int, list[int]]]]:
    groups: list[list[tuple[int, int, list[int]]]] = []
    for run in runs:
        if groups and run[0] - groups[-1][-1][1] - 1 <= 2 * _CONTEXT:
            groups[-1].append(run)
        else:
            groups.append([run])
    return groups
