"""Small parts: text, events of a stream, crash points, id stretches, the keeper, errors, shrinking."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime_image.agent import id_stretch
from runtime_image.agent.actions.shrink import shrink_action, shrink_observation
from runtime_image.agent.errors import STATUS, error_response
from runtime_image.agent.fakes import MemoryStore
from runtime_image.agent.keeper import About, Keeper
from runtime_image.agent.logs import lines_to
from runtime_image.agent.transfer import TransferError, UrlTransfer
from shoal.contract.actions import ActionRecord, Exec, ExecObservation, WriteFile
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.states import ActionStatus
from shoal.contract.streams import replayed_events
from shoal.contract.text import to_bytes, to_text, whole_utf8
from shoal.contract.urls import Url


@given(st.binary(max_size=200))
def test_base64_is_exact(data: bytes) -> None:
    """Whatever the bytes, base64 gives them back; text that is not UTF-8 says that it is lossy."""
    assert to_bytes(to_text(data, "base64")[0], "base64") == data
    text, lossy = to_text(data, "utf-8")
    assert lossy or to_bytes(text, "utf-8") == data


@given(st.text(max_size=50), st.integers(min_value=0, max_value=200))
def test_a_character_is_never_split(text: str, cut: int) -> None:
    """Cut anywhere, the whole part decodes, and at most three bytes wait for the next chunk."""
    data = text.encode()[:cut]
    whole = whole_utf8(data)
    assert len(data) - whole <= 3
    data[:whole].decode()


def _events(record: ActionRecord, stdout: int = 0) -> list[tuple[str, dict[str, object]]]:
    raw = b"".join(replayed_events(record.model_dump_json().encode(), stdout, 0)).decode()
    events = []
    for block in raw.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        events.append((fields["event"], json.loads(fields["data"])))
    return events


def test_a_recorded_step_streams_with_its_hole() -> None:
    """Head and tail come with their offsets and what was dropped between them; a resume goes on inside either."""
    seen = ExecObservation(
        exit_code=0, stdout="01234" + "56789", stdout_bytes=100, stdout_dropped_bytes=90, truncated=True
    )
    record = ActionRecord(
        id="a",
        epoch=1,
        status=ActionStatus.DONE,
        observation=seen,
        action=Exec(command="x", output_limit_bytes=10),
    )
    chunks = [data for kind, data in _events(record) if kind == "stdout"]
    assert [(one["data"], one["offset"], one["dropped_bytes"]) for one in chunks] == [
        ("01234", 0, 0),
        ("56789", 95, 90),
    ]
    chunks = [data for kind, data in _events(record, 97) if kind == "stdout"]
    assert [(one["data"], one["offset"]) for one in chunks] == [("789", 97)]
    assert [kind for kind, _ in _events(record, 100)] == ["exit"]


def test_crash_points_are_refused_outside_tests() -> None:
    """A live point needs SHOAL_TESTING=1, and has to exist; armed, the process ends as if killed."""

    def run(code: str, **env: str) -> int:
        script = f"from runtime_image.agent import crash; crash.arm(); {code}"
        return subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, **env}, stderr=subprocess.DEVNULL, check=False
        ).returncode

    assert run("crash.passing('after_fork')") == 0
    assert run("pass", SHOAL_CRASH_AT="after_fork") == 1
    assert run("pass", SHOAL_CRASH_AT="nowhere", SHOAL_TESTING="1") == 1
    assert run("crash.passing('after_fork')", SHOAL_CRASH_AT="after_fork", SHOAL_TESTING="1") == 137
    assert run("crash.passing('after_intent')", SHOAL_CRASH_AT="after_fork", SHOAL_TESTING="1") == 0


def test_homes_never_share_ids(tmp_path: Path) -> None:
    """A claim stays with its home over restarts, is given up explicitly, or with the home itself."""
    registry = tmp_path / "registry"
    homes = [tmp_path / name for name in "abc"]
    for home in homes:
        home.mkdir()
    first = [id_stretch.claim(home, registry) for home in homes]
    assert len(set(first)) == 3
    assert min(abs(one - two) for one in first for two in first if one != two) == id_stretch.RANGES * 65_536
    assert [id_stretch.claim(home, registry) for home in homes] == first
    id_stretch.give_up(homes[0], registry)
    id_stretch.give_up(homes[0], registry)
    homes[1].rmdir()
    new = tmp_path / "d"
    new.mkdir()
    assert id_stretch.claim(new, registry) in first[:2]
    assert id_stretch.claim(homes[2], registry) == first[2]


def test_what_is_kept_is_found_again_without_touching_the_disk(tmp_path: Path) -> None:
    """Descriptions may change, also to shorter ones; what has no socket or cannot be read is dropped."""
    import socket

    store = MemoryStore()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    keeper = Keeper(store)
    keeper.keep_session("sbx_1", ours, About(layers=[], warm=True, acknowledged=False))
    keeper.keep_session("sbx_1", ours, About(layers=[], running=True))
    store.put("sbx_2", ours.fileno())
    ours.close()
    (found,) = Keeper(store).load()
    assert (found.sandbox_id, found.about.running, found.about.warm) == ("sbx_1", True, False)
    assert "sbx_2" not in store.kept
    found.sock.send(b"x")
    assert theirs.recv(1) == b"x"
    found.sock.close()
    theirs.close()
    keeper.drop("sbx_1")
    keeper.drop("sbx_1")
    assert store.kept == {}


def test_every_code_an_agent_uses_has_a_status() -> None:
    """Statuses are errors; a wait is told in the header."""
    assert all(400 <= status < 600 for status in STATUS.values())
    answer = error_response(ShoalError(ErrorCode.HOST_REFUSED, "full", retry_after_s=0.2))
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


async def test_transfers_by_path_are_atomic_and_typed(tmp_path: Path) -> None:
    """A put is whole or not there; what does not exist is told as missing; an object that exists is left alone."""
    source, target = tmp_path / "source", tmp_path / "deep" / "target"
    source.write_bytes(b"content")
    transfer = UrlTransfer()
    url = Url(url=target.as_uri())
    await transfer.put(url, source)
    assert [path.name for path in target.parent.iterdir()] == ["target"]
    source.write_bytes(b"other")
    await transfer.put(url.model_copy(update={"exists": True}), source)
    assert await transfer.get(url, tmp_path / "copy") == 7
    with pytest.raises(TransferError) as missing:
        await transfer.get(Url(url=(tmp_path / "none").as_uri()), tmp_path / "copy")
    assert missing.value.missing


def test_full_journals_keep_what_was_done() -> None:
    """Long texts are cut and counted as dropped; the shape stays the contract's."""
    cut = shrink_observation(ExecObservation(exit_code=0, stdout="y" * 100_000, stdout_bytes=100_000))
    assert isinstance(cut, ExecObservation)
    assert (len(cut.stdout) + cut.stdout_dropped_bytes, cut.truncated) == (100_000, True)
    action = shrink_action(WriteFile(path="/a", content="x" * 100_000))
    assert isinstance(action, WriteFile)
    assert len(action.content) < 2000


def test_a_log_that_cannot_be_written_breaks_nothing() -> None:
    """A full disk under the log, or a closed stream, costs the line and no more."""
    with open("/dev/full", "w") as full:
        log = lines_to(full)()
        log.error("x" * 100_000)
        log.info("y")
        with contextlib.suppress(OSError):
            full.close()
        log.info("z")
