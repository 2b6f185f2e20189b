"""A guest that was taken over cannot hurt the agent: a breach closes the link, with the reason, in bounded memory."""

from __future__ import annotations

import array
import asyncio
import os
import socket
import tracemalloc
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime_image.agent.link import (
    GuestLink,
    GuestProcess,
    LinkClosedError,
    LinkViolationError,
    OperationError,
    ProcessSpec,
    SpawnError,
)
from runtime_image.guest import wire
from runtime_image.guest.workers import BYTES, ITEM, RECORD, RESULT


class FakeGuest:
    """The other end of a link, which says what the test wants."""

    def __init__(self) -> None:
        ours, self.sock = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.setblocking(False)
        self._ours = ours
        self.link: GuestLink

    async def receive(self) -> tuple[int, int, int, bytes, list[int]]:
        """The next frame of the agent, with descriptors."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                data, ancillary, _, _ = self.sock.recvmsg(wire.FRAME_LIMIT, socket.CMSG_SPACE(16))
            except BlockingIOError:
                ready = loop.create_future()
                loop.add_reader(self.sock.fileno(), ready.set_result, None)
                await ready
                loop.remove_reader(self.sock.fileno())
                continue
            fds = array.array("i")
            for _, _, payload in ancillary:
                fds.frombytes(payload)
            kind, stream, ident, body = wire.split(data)
            return kind, stream, ident, bytes(body), list(fds)

    def send(self, kind: int, stream: int, ident: int, body: object) -> None:
        """A frame; a body that is not bytes is packed."""
        raw = body if isinstance(body, bytes) else msgpack.packb(body)
        self.sock.send(wire.frame(kind, stream, ident, raw))

    async def greet(self, **fields: object) -> GuestLink:
        """Let an agent connect."""
        connecting = asyncio.create_task(GuestLink.connect(self._ours, timeout_s=5))
        _, _, _, body, _ = await self.receive()
        hello = {
            "version": wire.VERSION, "nonce": msgpack.unpackb(body)["nonce"], "pid": 1,
            "shells": ["sh"], "greeted": 1, "processes": 0, **fields,
        }  # fmt: skip
        self.send(wire.HELLO, 0, 0, hello)
        self.link = await connecting
        return self.link

    async def request(self) -> tuple[int, dict[str, Any], list[int]]:
        """The next request: its id, body and descriptors."""
        while True:
            kind, _, ident, body, fds = await self.receive()
            if kind == wire.REQUEST:
                return ident, msgpack.unpackb(body), fds

    async def spawn(self, **fields: Any) -> tuple[GuestProcess, int]:
        """A started process and its handle."""
        spec = ProcessSpec(process_id="p", command="x", **fields)
        starting = asyncio.create_task(self.link.spawn(spec))
        ident, body, _ = await self.request()
        self.send(wire.RESPONSE, 0, ident, {"pid": 7})
        return await starting, body["handle"]


@pytest.fixture
async def guest() -> AsyncIterator[FakeGuest]:
    """A fake guest, greeted."""
    fake = FakeGuest()
    await fake.greet()
    yield fake
    fake.link.close()
    fake.sock.close()


def data(offset: int, payload: bytes) -> bytes:
    """The body of a DATA frame."""
    return wire.OFFSET.pack(offset) + payload


EXIT = {
    "code": 0,
    "signal": None,
    "cpu_us": 1,
    "max_rss_kib": 1,
    "duration_us": 1,
    "totals": [[1, 0], [2, 0]],
}


def of(kind: int, stream: int, body: object, *, away: int = 0) -> Callable[[int], bytes]:
    """A frame for the handle it is given, or one `away` from it."""
    raw = body if isinstance(body, bytes) else msgpack.packb(body)
    return lambda handle: wire.frame(kind, stream, handle + away, raw)


def an_exit(**fields: object) -> Callable[[int], bytes]:
    """An EXIT frame with some fields otherwise."""
    return of(wire.EXIT, 0, {**EXIT, **fields})


BREACHES: dict[str, list[Callable[[int], bytes]]] = {
    "noise": [lambda _: b"\xff" * 50],
    "a frame that is too long": [lambda _: b"\x04" + bytes(wire.FRAME_LIMIT)],
    "a frame that is too short": [lambda _: b"\x04"],
    "a kind of the agent's": [of(wire.REQUEST, 0, {})],
    "a second hello": [of(wire.HELLO, 0, {})],
    "an answer to no request": [of(wire.RESPONSE, 0, {}, away=99)],
    "data of no process": [of(wire.DATA, 1, data(0, b"x"), away=99)],
    "data of no stream": [of(wire.DATA, 0, data(0, b"x"))],
    "data without bytes": [of(wire.DATA, 1, data(0, b""))],
    "data without offset": [of(wire.DATA, 1, b"abc")],
    "data that goes back": [of(wire.DATA, 1, data(5, b"x"))] * 2,
    "data at an absurd offset": [of(wire.DATA, 1, data(1 << 63, b"x"))],
    "data after the exit": [an_exit(), of(wire.DATA, 1, data(0, b"x"))],
    "two exits": [an_exit(), an_exit()],
    "an exit of nothing": [of(wire.EXIT, 0, {})],
    "an exit that is no map": [of(wire.EXIT, 0, [1])],
    "an exit with code and signal": [an_exit(signal=9)],
    "an exit with an odd code": [an_exit(code="0")],
    "an exit with a negative time": [an_exit(cpu_us=-1)],
    "an exit with odd totals": [an_exit(totals=[[1]])],
    "an exit with a total of no stream": [an_exit(totals=[[9, 1]])],
    "an exit that takes output back": [of(wire.DATA, 1, data(0, b"xx")), an_exit(totals=[[1, 1]])],
    "credit for output": [of(wire.CREDIT, 1, wire.OFFSET.pack(1 << 30))],
    "credit beyond the window": [of(wire.CREDIT, 0, wire.OFFSET.pack(wire.WINDOW + 1))],
    "credit that shrinks": [of(wire.CREDIT, 0, wire.OFFSET.pack(5))],
    "credit of another size": [of(wire.CREDIT, 0, b"123")],
    "a body of deep nesting": [of(wire.EXIT, 0, b"\x91" * 60000)],
    "a body that claims much": [of(wire.EXIT, 0, b"\xdd\xff\xff\xff\xff")],
}


@pytest.mark.parametrize("name", BREACHES)
async def test_a_breach_closes_the_link_for_everybody(guest: FakeGuest, name: str) -> None:
    """Whoever waits gets LinkViolationError; nothing goes on afterwards."""
    process, handle = await guest.spawn(stdin="open")
    waiting = asyncio.create_task(process.wait())
    asking = asyncio.create_task(guest.link.request({"op": "resize"}))
    await guest.request()
    for frame in BREACHES[name]:
        guest.sock.send(frame(handle))
    async with asyncio.timeout(5):
        await guest.link.closed.wait()
        with pytest.raises(LinkViolationError):
            await asking
    if name in ("two exits", "data after the exit"):
        assert (await waiting).exit_code == 0
    else:
        with pytest.raises(LinkViolationError):
            await waiting
    with pytest.raises(LinkViolationError):
        await guest.link.spawn(ProcessSpec(process_id="q", command="x"))


async def test_data_beyond_the_credit_closes_the_link(guest: FakeGuest) -> None:
    """A stream may not run further ahead than it was allowed."""
    process, handle = await guest.spawn()
    process._grant = lambda stream, allowed: None  # type: ignore[method-assign]
    sent = 0
    while sent <= wire.WINDOW:
        guest.send(wire.DATA, 1, handle, data(sent, bytes(30000)))
        sent += 30000
        await asyncio.sleep(0)
    with pytest.raises(LinkViolationError, match="credit"):
        await process.wait()


async def test_a_flood_within_the_rules_stays_within_the_cap(guest: FakeGuest) -> None:
    """A guest that sends as fast as it is allowed costs no more memory than the output cap."""
    process, handle = await guest.spawn(output_limit_bytes=100_000)
    tracemalloc.start()
    offset = allowed = 0
    allowed = wire.WINDOW
    for _ in range(200):
        while allowed - offset < 60000:
            kind, _, _, body, _ = await guest.receive()
            if kind == wire.CREDIT:
                allowed = wire.number(memoryview(body))
        guest.send(wire.DATA, 1, handle, data(offset, bytes(60000)))
        offset += 60000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert process.stdout.total_bytes > 5_000_000
    assert peak < 1_500_000
    assert process.stdout.kept_bytes == 100_000


NUMBERS = st.integers(-(2**63), 2**64 - 1)
BODIES = st.dictionaries(
    st.sampled_from(["code", "signal", "totals", "errno", "pid", "message", "stage"]),
    st.none() | NUMBERS | st.text(max_size=3) | st.lists(st.lists(NUMBERS, max_size=3), max_size=3),
    max_size=6,
).map(msgpack.packb)
FRAMES = st.binary(min_size=1, max_size=100) | st.builds(
    wire.frame, st.integers(1, 7), st.integers(0, 3), st.integers(0, 4), st.binary(max_size=40) | BODIES
)


@settings(max_examples=300, deadline=None)
@given(st.lists(FRAMES, max_size=8))
def test_no_frames_raise_anything_else(frames: list[bytes]) -> None:
    """Whatever a guest sends, the agent's loop sees a link error or a result, never another exception."""

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: pytest.fail(str(context)))
        guest = FakeGuest()
        link = await guest.greet()
        process, _ = await guest.spawn(stdin="open")
        asking = asyncio.create_task(link.request({"op": "x"}))
        await guest.request()
        for frame in frames:
            guest.sock.send(frame)
        guest.sock.close()
        await link.closed.wait()
        results = await asyncio.gather(process.wait(), asking, return_exceptions=True)
        for result in results:
            assert not isinstance(result, BaseException) or isinstance(
                result, LinkClosedError | OperationError
            )

    asyncio.run(run())


@pytest.mark.parametrize(
    "hello",
    [{"pid": "1"}, {"shells": 5}, {"shells": ["zsh"]}, {"greeted": None}, {"version": 999}, {"version": "1"}],
)
async def test_an_odd_hello_is_refused(hello: dict[str, object]) -> None:
    """Wrong types and other versions end the connection with the reason."""
    guest = FakeGuest()
    with pytest.raises(LinkClosedError):
        await guest.greet(**hello)
    guest.sock.close()


async def test_frames_before_the_hello_are_someone_elses() -> None:
    """What was meant for the agent before is skipped, but not without end."""
    guest = FakeGuest()
    for number in range(3):
        guest.send(wire.RESPONSE, 0, number, {})
    link = await guest.greet()
    assert not link.closed.is_set()
    link.close()
    guest.sock.close()


async def test_a_descriptor_that_comes_along_is_not_kept(guest: FakeGuest) -> None:
    """The guest cannot fill the agent's table of descriptors."""
    process, handle = await guest.spawn()
    read_end, write_end = os.pipe()
    frame = wire.frame(wire.EXIT, 0, handle, msgpack.packb(EXIT))
    guest.sock.sendmsg([frame], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [write_end]))])
    os.close(write_end)
    assert (await process.wait()).exit_code == 0
    assert os.read(read_end, 1) == b"", "somebody still holds the other end"
    os.close(read_end)


async def test_a_refusal_without_its_reason_is_a_breach(guest: FakeGuest) -> None:
    """Failures have errno, message and stage."""
    starting = asyncio.create_task(guest.link.spawn(ProcessSpec(process_id="p", command="x")))
    ident, _, _ = await guest.request()
    guest.send(wire.RESPONSE, 0, ident, {"errno": 2})
    with pytest.raises(LinkViolationError):
        await starting


async def test_a_late_answer_to_who_was_cancelled_is_fine(guest: FakeGuest) -> None:
    """Cancelling a caller does not make its answer a breach, but only one answer is due."""
    starting = asyncio.create_task(guest.link.spawn(ProcessSpec(process_id="p", command="x")))
    ident, body, _ = await guest.request()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    guest.send(wire.RESPONSE, 0, ident, {"pid": 5})
    guest.send(wire.DATA, 1, body["handle"], data(0, b"x"))
    with pytest.raises(SpawnError, match="exists"):
        await guest.link.spawn(ProcessSpec(process_id="p", command="x"))
    assert not guest.link.closed.is_set()
    guest.send(wire.RESPONSE, 0, ident, {"pid": 5})
    await guest.link.closed.wait()


RECORDS: dict[str, bytes] = {
    "an unknown kind": RECORD.pack(9, 1) + b"x",
    "content that is too long": RECORD.pack(BYTES, 1 << 30),
    "a map that is too long": RECORD.pack(ITEM, 1 << 20),
    "an item that is no map": RECORD.pack(ITEM, 1) + b"\x01",
    "an unknown field": RECORD.pack(ITEM, 4) + msgpack.packb({"z": 1})[:4].ljust(4, b"\0"),
    "a field of another type": RECORD.pack(RESULT, len(msgpack.packb({"mode": "x"})))
    + msgpack.packb({"mode": "x"}),
    "an error without reason": RECORD.pack(RESULT, len(msgpack.packb({"error": {}})))
    + msgpack.packb({"error": {}}),
}


@pytest.mark.parametrize("name", RECORDS)
async def test_odd_records_of_a_helper_close_the_link(guest: FakeGuest, name: str) -> None:
    """The pipe of a file operation is as little trusted as the link."""
    reading = asyncio.create_task(guest.link.file_op({"op": "read", "path": "/x"}))
    _, _, fds = await guest.request()
    os.write(fds[0], RECORDS[name])
    for fd in fds:
        os.close(fd)
    with pytest.raises(LinkViolationError):
        await reading


@pytest.mark.parametrize("kind", ["content", "items"])
async def test_a_helper_without_end_is_cut(guest: FakeGuest, kind: str) -> None:
    """Results are bounded: what is beyond is not read, and the helper is told to stop."""
    reading = asyncio.create_task(
        guest.link.file_op({"op": "read" if kind == "content" else "list", "path": "/x"}, limit_bytes=1 << 20)
    )
    ident, _, fds = await guest.request()
    os.set_blocking(fds[0], False)
    entry = msgpack.packb({"path": b"x" * 900})
    piece = (
        RECORD.pack(BYTES, 1000) + bytes(1000) if kind == "content" else RECORD.pack(ITEM, len(entry)) + entry
    )
    written, waiting = 0, b""
    while not reading.done():
        waiting = waiting or piece * 60
        try:
            count = os.write(fds[0], waiting)
            written, waiting = written + count, waiting[count:]
        except BlockingIOError:
            await asyncio.sleep(0)
        except BrokenPipeError:
            break
    result = await reading
    assert result["truncated"] is True
    assert written < 4 << 20
    _, body, _ = await guest.request()
    assert (body["op"], body["request"]) == ("cancel", ident)
    os.close(fds[0])


async def test_many_kept_processes_are_too_many(guest: FakeGuest) -> None:
    """A guest cannot make an agent that takes over allocate what it likes."""
    listing = asyncio.create_task(guest.link.processes())
    item = {
        "pid": 3,
        "running": True,
        "age_us": 1,
        "stdin_open": False,
        "stdin_received": 0,
        "limit": 60 << 20,
        "streams": [1],
    }
    number = 0

    async def answer() -> None:
        nonlocal number
        while True:
            ident, body, _ = await guest.request()
            page: dict[str, object] = item
            if body["op"] == "list":
                page = {"processes": [{**item, "process_id": f"{number + n:08}"} for n in range(64)]}
                number += 64
            guest.send(wire.RESPONSE, 0, ident, page)

    answering = asyncio.create_task(answer())
    with pytest.raises(LinkViolationError, match="more processes"):
        await listing
    answering.cancel()
    assert number <= 64
