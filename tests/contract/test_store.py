"""The store port's promises, on every adapter; and the suite itself: it fails an adapter whose conditions are gone."""

from __future__ import annotations

import asyncio
import inspect
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from provisioner.store.fake import FakeStore
from provisioner.store.port import (
    MAX_OPS,
    Absent,
    Add,
    AttributeIn,
    AttributeIs,
    Check,
    ConditionFailed,
    Conflict,
    Delete,
    Exists,
    Key,
    Op,
    Put,
    Store,
    Stored,
    StoreError,
    StoreUnavailable,
    TokenReused,
    TooLarge,
    TooManyOps,
    Update,
    VersionIs,
)
from provisioner.store.sizes import MAX_ITEM_BYTES, MAX_PK_BYTES, MAX_SK_BYTES
from provisioner.store.sqlite import SqliteStore
from tests.contract.dynamo import dynamo_store

Check_ = Callable[[Store], Awaitable[None]]


def key(sk: str, pk: str = "p") -> Key:
    return Key(pk=pk, sk=sk)


def tokens(count: int) -> list[str]:
    """Tokens that no other test has: adapters on one emulator share them."""
    return [uuid.uuid4().hex for _ in range(count)]


async def value(store: Store, sk: str) -> dict[str, object] | None:
    stored = await store.get(key(sk))
    return dict(stored.item) if stored else None


async def fails(store: Store, *ops: Op) -> ConditionFailed:
    with pytest.raises(ConditionFailed) as raised:
        await store.transact(ops)
    return raised.value


# -- the promises ------------------------------------------------------------------------------------------------------


async def reads_what_was_written(store: Store) -> None:
    """An item comes back as it was put: nested values, sets, unicode, numbers, None; a missing one is None."""
    item = {
        "text": "é \u2028 \x00",
        "n": 2**60,
        "f": 0.5,
        "small": 1e-300,
        "whole": 3.0,
        "huge": 10**60,
        "negative": -(10**37) - 7,
        "b": True,
        "none": None,
        "empty": "",
        "list": [],
        "deep": {"l": [1, 1.0, "a", {"x": [], "": None}]},
        "set": {"$set": ["a"]},
        "value": {"$value": 1},
        "": "no name",
        "_": "low",
        "pk": "names",
        "sk": "of",
        "v": 7,
        "expires": "keys",
        "size": "a reserved word",
    }
    tags = frozenset({"b", "a"})
    await store.transact([Put(key=key("a"), item={**item, "tags": tags})])
    stored = await store.get(key("a"))
    assert stored is not None
    assert stored.item == {**item, "tags": tags}
    kinds = {name: type(value) for name, value in stored.item.items()}
    assert kinds == {name: type(value) for name, value in {**item, "tags": tags}.items()}
    assert stored.key == key("a")
    assert await store.get(key("b")) is None


async def an_empty_set_is_no_attribute(store: Store) -> None:
    """An empty set is kept as no attribute, whichever way it came."""
    empty: frozenset[str] = frozenset()
    await store.transact([Put(key=key("a"), item={"s": empty, "n": 1})])
    assert await value(store, "a") == {"n": 1}
    await store.transact([Update(key=key("a"), set={"s": empty}, insert={"t": empty}, discard={"u": empty})])
    assert await value(store, "a") == {"n": 1}
    await store.transact([Update(key=key("a"), set={"s": frozenset({"", "x"})})])
    await store.transact([Update(key=key("a"), set={"s": empty})])
    assert await value(store, "a") == {"n": 1}


async def keys_are_any_text(store: Store) -> None:
    """Keys may have any character and any length up to the limits; what cannot be a key is refused."""
    odd = [
        "\x00",
        " ",
        "#",
        "é" * (MAX_SK_BYTES // 2),
        "\U0001f600" * (MAX_SK_BYTES // 4),
        "\uffff",
        "\ue000",
    ]
    long = "é" * (MAX_PK_BYTES // 2)
    await store.transact([Put(key=Key(pk=long, sk=sk), item={"sk": sk}) for sk in odd])
    page = await store.query(long)
    assert [stored.key.sk for stored in page.items] == sorted(odd)
    assert [stored.item["sk"] for stored in page.items] == sorted(odd)
    for pk, sk in (("", "a"), ("a", ""), (long + "x", "a"), ("a", "x" * (MAX_SK_BYTES + 1))):
        with pytest.raises(ValueError):
            Key(pk=pk, sk=sk)
    for pk in ("", long + "x"):
        with pytest.raises(ValueError):
            await store.query(pk)


async def get_many_keeps_the_order(store: Store) -> None:
    """Many items come in the order asked, missing ones as None, any number of them."""
    ops = [Put(key=key(f"{n:03d}"), item={"n": n}) for n in range(MAX_OPS)]
    await store.transact(ops)
    asked = [key(f"{n:03d}") for n in reversed(range(150))]
    found = await store.get_many(asked)
    assert [stored.item["n"] if stored else None for stored in found] == [
        n if n < MAX_OPS else None for n in reversed(range(150))
    ]
    assert await store.get_many([]) == []
    twice = await store.get_many([key("001"), key("never"), key("001")])
    assert [stored.item["n"] if stored else None for stored in twice] == [1, None, 1]


async def absent_lets_one_in(store: Store) -> None:
    """`Absent` holds once; the failure names the operation and what is there."""
    await store.transact([Put(key=key("a"), item={"n": 1}, conditions=(Absent(),))])
    error = await fails(
        store, Put(key=key("b"), item={}), Put(key=key("a"), item={"n": 2}, conditions=(Absent(),))
    )
    assert error.index == 1
    assert error.current is not None
    assert error.current.item == {"n": 1}
    assert await value(store, "a") == {"n": 1}
    assert await value(store, "b") is None


async def exists_needs_an_item(store: Store) -> None:
    """`Exists` fails without an item, for every kind of operation."""
    for op in (
        Put(key=key("a"), item={}, conditions=(Exists(),)),
        Update(key=key("a"), set={"n": 1}, conditions=(Exists(),)),
        Delete(key=key("a"), conditions=(Exists(),)),
        Check(key=key("a"), conditions=(Exists(),)),
    ):
        assert (await fails(store, op)).current is None
    assert await store.get(key("a")) is None


async def versions_guard(store: Store) -> None:
    """Every write changes the version; `VersionIs` holds for the one that was read and makes the next number."""
    await store.transact([Put(key=key("a"), item={"n": 0}, conditions=(Absent(),))])
    seen: list[int] = []
    for n in range(1, 4):
        stored = await store.get(key("a"))
        assert stored is not None
        seen.append(stored.version)
        await store.transact(
            [Put(key=key("a"), item={"n": n}, conditions=(VersionIs(version=stored.version),))]
        )
        after = await store.get(key("a"))
        assert after is not None
        assert after.version == stored.version + 1
        await fails(store, Put(key=key("a"), item={}, conditions=(VersionIs(version=stored.version),)))
    assert seen[0] == 1
    await store.transact([Put(key=key("a"), item={"n": 9})])
    blind = await store.get(key("a"))
    assert blind is not None
    assert blind.version not in seen
    await store.transact([Update(key=key("a"), set={"n": 10})])
    updated = await store.get(key("a"))
    assert updated is not None
    assert updated.version == blind.version + 1
    await fails(store, Delete(key=key("missing"), conditions=(VersionIs(version=1),)))


async def attributes_guard(store: Store) -> None:
    """`AttributeIs` and `AttributeIn` compare one attribute; None is also a missing one; a missing item never holds."""
    item = {"state": "x", "n": 1, "none": None, "yes": True, "f": 1.0, "many": [1], "v": 5, "big": 2**60}
    await store.transact([Put(key=key("a"), item=item)])
    for condition in (
        AttributeIs(name="state", value="x"),
        AttributeIs(name="none", value=None),
        AttributeIs(name="missing", value=None),
        AttributeIn(name="state", values=("w", "x")),
        AttributeIs(name="n", value=1),
        AttributeIs(name="yes", value=True),
        AttributeIs(name="v", value=5),
        AttributeIs(name="big", value=2**60),
        AttributeIn(name="state", values=(*(str(n) for n in range(150)), "x")),
        AttributeIn(name="n", values=("1", True, 1)),
    ):
        await store.transact([Check(key=key("a"), conditions=(condition,))])
    for condition in (
        AttributeIs(name="state", value="y"),
        AttributeIs(name="state", value=None),
        AttributeIs(name="missing", value="x"),
        AttributeIn(name="state", values=("y",)),
        AttributeIn(name="state", values=()),
        AttributeIs(name="yes", value=1),
        AttributeIs(name="n", value=True),
        AttributeIs(name="f", value=1),
        AttributeIs(name="n", value="1"),
        AttributeIs(name="many", value=1),
        AttributeIs(name="big", value=2**60 + 1),
    ):
        await fails(store, Check(key=key("a"), conditions=(condition,)))
    await fails(store, Check(key=key("b"), conditions=(AttributeIs(name="state", value=None),)))


async def all_conditions_must_hold(store: Store) -> None:
    """Several conditions of one operation hold together, or the operation fails."""
    await store.transact([Put(key=key("a"), item={"s": "x"}, conditions=(Absent(),))])
    both = (VersionIs(version=1), AttributeIs(name="s", value="y"))
    await fails(store, Put(key=key("a"), item={}, conditions=both))
    await fails(store, Put(key=key("a"), item={}, conditions=tuple(reversed(both))))


async def a_transaction_is_all_or_nothing(store: Store) -> None:
    """One failed condition, wherever it stands, and nothing of the transaction is written."""
    await store.transact([Put(key=key("old"), item={"n": 1})])
    for place in range(3):
        ops: list[Op] = [
            Put(key=key("new"), item={}),
            Update(key=key("old"), add={"n": Add(delta=1)}),
        ]
        ops.insert(place, Check(key=key("nothing"), conditions=(Exists(),)))
        assert (await fails(store, *ops)).index == place
    assert await value(store, "new") is None
    assert await value(store, "old") == {"n": 1}


async def updates_change_what_they_name(store: Store) -> None:
    """Set, remove, add, insert and discard change their attributes alone, and make the item when it is missing."""
    await store.transact(
        [
            Update(
                key=key("a"),
                set={"s": "x"},
                add={"n": Add(delta=2)},
                insert={"tags": frozenset({"a", "b"})},
            )
        ]
    )
    assert await value(store, "a") == {"s": "x", "n": 2, "tags": frozenset({"a", "b"})}
    await store.transact(
        [
            Update(
                key=key("a"),
                remove=("s", "missing"),
                add={"n": Add(delta=-5)},
                insert={"tags": frozenset({"c"})},
                discard={"none": frozenset({"x"})},
            )
        ]
    )
    assert await value(store, "a") == {"n": -3, "tags": frozenset({"a", "b", "c"})}
    await store.transact([Update(key=key("a"), discard={"tags": frozenset({"a", "b", "c", "d"})})])
    assert await value(store, "a") == {"n": -3}


async def counters_keep_their_bounds(store: Store) -> None:
    """A sum out of bounds fails like a condition, also from a missing counter; the bounds themselves are allowed."""
    bounded = Add(delta=2, minimum=0, maximum=4)
    await store.transact([Update(key=key("a"), add={"n": bounded})])
    await store.transact([Update(key=key("a"), add={"n": bounded})])
    error = await fails(store, Update(key=key("a"), add={"n": bounded}))
    assert error.index == 0
    await fails(store, Update(key=key("a"), add={"n": Add(delta=-5, minimum=0)}))
    await fails(store, Update(key=key("b"), add={"n": Add(delta=-1, minimum=0)}))
    await store.transact([Update(key=key("a"), add={"n": Add(delta=-4, minimum=0)})])
    assert await value(store, "a") == {"n": 0}
    assert await store.get(key("b")) is None


async def several_counters_have_their_own_bounds(store: Store) -> None:
    """Counters of one update stand or fall together; a missing one counts as 0 against its bounds."""
    limits = {"a": Add(delta=3, maximum=5), "b": Add(delta=-1, minimum=-2), "v": Add(delta=1, minimum=1)}
    await store.transact([Update(key=key("a"), add=limits)])
    assert await value(store, "a") == {"a": 3, "b": -1, "v": 1}
    await fails(store, Update(key=key("a"), add=limits))
    assert await value(store, "a") == {"a": 3, "b": -1, "v": 1}
    await fails(store, Update(key=key("b"), add={"a": Add(delta=1, minimum=2)}))
    await fails(store, Update(key=key("b"), add={"a": Add(delta=3, maximum=2)}))
    await store.transact([Update(key=key("a"), add={"big": Add(delta=2**61)}, set={"n": None})])
    await store.transact([Update(key=key("a"), add={"big": Add(delta=2**61, maximum=2**62)})])
    assert (await value(store, "a") or {})["big"] == 2**62


async def deletes(store: Store) -> None:
    """A deleted item is gone, deleting nothing is no failure, a condition guards it."""
    await store.transact([Put(key=key("a"), item={"n": 1})])
    await fails(store, Delete(key=key("a"), conditions=(AttributeIs(name="n", value=2),)))
    await store.transact([Delete(key=key("a")), Delete(key=key("never"))])
    assert await store.get(key("a")) is None


async def queries_are_ordered_pages(store: Store) -> None:
    """A partition's items come by sort key, with prefix, limit, cursor and both directions; nothing of others."""
    names = ["a#1", "a#2", "a#3", "b#1", "b#2", "é#1", "\U0001f600#1"]
    await store.transact([Put(key=key(name), item={}) for name in names])
    await store.transact([Put(key=key("a#1", pk="other"), item={}), Put(key=key("a", pk="p2"), item={})])

    async def sks(**about: object) -> list[str]:
        page = await store.query("p", **about)  # type: ignore[arg-type]
        return [stored.key.sk for stored in page.items]

    assert await sks() == sorted(names)
    assert await sks(reverse=True) == sorted(names, reverse=True)
    assert await sks(prefix="a#") == ["a#1", "a#2", "a#3"]
    assert await sks(prefix="a#", reverse=True, limit=2) == ["a#3", "a#2"]
    assert await sks(prefix="\U0001f600") == ["\U0001f600#1"]
    assert await sks(prefix="zzz") == []
    assert await sks(after="b#1", prefix="b") == ["b#2"]
    assert await sks(after="b#1", prefix="b", reverse=True) == []
    assert await sks(after="b#0", prefix="b") == ["b#1", "b#2"]
    assert await sks(after="a#9", prefix="b") == ["b#1", "b#2"]
    assert await sks(after="a#9", prefix="b", reverse=True) == []
    assert await sks(after="c", prefix="b") == []
    assert await sks(after="c", prefix="b", reverse=True) == ["b#2", "b#1"]
    assert await sks(after="b", prefix="b#") == ["b#1", "b#2"]
    assert await sks(after="b", prefix="b#", reverse=True) == []
    assert await sks(after="") == sorted(names)
    assert await sks(after="", reverse=True) == []
    for reverse in (False, True):
        found: list[str] = []
        after: str | None = None
        while True:
            page = await store.query("p", after=after, limit=3, reverse=reverse)
            assert len(page.items) <= 3
            found += [stored.key.sk for stored in page.items]
            after = page.after
            if after is None:
                break
        assert found == sorted(names, reverse=reverse)
    exact = await store.query("p", limit=len(names))
    assert exact.after is None
    for limit in (0, 1001):
        with pytest.raises(ValueError):
            await store.query("p", limit=limit)


async def a_page_is_as_long_as_asked(store: Store) -> None:
    """A page has as many items as there are, up to its limit, however large they are: more than 1 MB is no end."""
    for start in (0, 5, 10):
        ops = [Put(key=key(f"{n:02d}"), item={"text": "x" * 200_000}) for n in range(start, start + 5)]
        await store.transact(ops)
    page = await store.query("p", limit=1000)
    assert [stored.key.sk for stored in page.items] == [f"{n:02d}" for n in range(15)]
    assert page.after is None
    page = await store.query("p", limit=12, reverse=True)
    assert [stored.key.sk for stored in page.items] == [f"{n:02d}" for n in range(14, 2, -1)]
    assert page.after == "03"
    found = await store.get_many([key(f"{n:02d}") for n in range(16)])
    assert [stored is not None for stored in found] == [True] * 15 + [False]


async def reads_see_the_last_answered_write(store: Store) -> None:
    """A write that was answered is seen by every read and query after it."""
    for n in range(50):
        await store.transact([Put(key=key("a"), item={"n": n})])
        assert await value(store, "a") == {"n": n}
        assert (await store.query("p")).items[0].item == {"n": n}


async def refuses_what_is_too_much(store: Store) -> None:
    """Over 100 operations, over 400 KB an item, no operation, two on one key: refused, and nothing is written."""
    with pytest.raises(TooManyOps):
        await store.transact([Put(key=key(str(n)), item={}) for n in range(MAX_OPS + 1)])
    large = {"text": "é" * (MAX_ITEM_BYTES // 2)}
    with pytest.raises(TooLarge):
        await store.transact([Put(key=key("before"), item={}), Put(key=key("a"), item=large)])
    await store.transact([Put(key=key("a"), item={"text": "x" * (MAX_ITEM_BYTES - 100)})])
    with pytest.raises(TooLarge):
        await store.transact([Update(key=key("a"), set={"more": "x" * 200})])
    with pytest.raises(ValueError):
        await store.transact([])
    with pytest.raises(ValueError):
        await store.transact([Put(key=key("b"), item={}), Delete(key=key("b"))])
    with pytest.raises(ValueError):
        await store.transact([Update(key=key("b"), set={"n": 1}, add={"n": Add(delta=1)})])
    ops = [Put(key=key(f"l{n:02d}"), item={"text": "x" * 390_000}) for n in range(11)]
    with pytest.raises(TooLarge):
        await store.transact(ops)
    assert [stored.key.sk for stored in (await store.query("p")).items] == ["a"]


async def a_token_makes_a_repeat_harmless(store: Store) -> None:
    """The same operations under the same token are written once; other operations under it are refused."""
    one, other = tokens(2)
    for n in range(3):
        names = ["x", "y", "z"][n:] + ["x", "y", "z"][:n]
        ops: list[Op] = [
            Update(key=key("a"), add={"n": Add(delta=1)}, insert={"s": frozenset(names)}),
            Update(key=key("b"), set=dict.fromkeys(names, 1)),
            Put(key=key("c"), item=dict.fromkeys(names, 1)),
        ]
        await store.transact(ops, token=one)
        if n == 0:
            first = await store.get(key("c"))
    assert (await value(store, "a") or {})["n"] == 1
    assert await store.get(key("c")) == first
    with pytest.raises(TokenReused):
        await store.transact([Update(key=key("a"), add={"n": Add(delta=2)})], token=one)
    await store.transact(ops, token=other)
    assert (await value(store, "a") or {})["n"] == 2


async def a_token_is_any_text(store: Store) -> None:
    """A token may be of any length and any characters, and is not mixed up with one like it."""
    start = "é" * 300
    for token in (start, start + "x", "x" * 37, "x" * 36, "x"):
        unique = token + tokens(1)[0]
        for _ in range(2):
            await store.transact([Update(key=key("a"), add={"n": Add(delta=1)})], token=unique)
    assert await value(store, "a") == {"n": 5}


async def sixty_four_with_one_token_write_once(store: Store) -> None:
    """Of 64 repeats of one transaction at once, one writes; all are answered, or told to ask again."""
    (token,) = tokens(1)

    async def add() -> None:
        while True:
            try:
                await store.transact([Update(key=key("n"), add={"n": Add(delta=1)})], token=token)
            except (Conflict, StoreUnavailable):
                continue
            return

    await asyncio.gather(*(add() for _ in range(64)))
    assert await value(store, "n") == {"n": 1}


async def a_failed_transaction_does_not_use_its_token(store: Store) -> None:
    """A token whose transaction wrote nothing can be used again."""
    op = Put(key=key("a"), item={}, conditions=(Exists(),))
    (token,) = tokens(1)
    with pytest.raises(ConditionFailed):
        await store.transact([op], token=token)
    await store.transact([Put(key=key("a"), item={"n": 1})])
    await store.transact([op], token=token)
    assert await value(store, "a") == {}


async def expiry_only_cleans(store: Store) -> None:
    """`expires_at` comes back as given and hides nothing; an update keeps it unless it names another."""
    past = datetime(2020, 1, 1, tzinfo=UTC)
    later = datetime(2100, 1, 1, 12, 30, tzinfo=UTC)
    await store.transact([Put(key=key("a"), item={"n": 1}, expires_at=past), Put(key=key("b"), item={})])
    stored = await store.get(key("a"))
    assert stored is not None
    assert stored.expires_at == past
    await store.transact([Update(key=key("a"), set={"n": 2})])
    assert (await store.get(key("a"))).expires_at == past  # type: ignore[union-attr]
    await store.transact([Update(key=key("a"), set={"n": 3}, expires_at=later)])
    assert (await store.get(key("a"))).expires_at == later  # type: ignore[union-attr]
    part = later.replace(microsecond=1)
    await store.transact([Update(key=key("a"), set={"n": 4}, expires_at=part)])
    assert (await store.get(key("a"))).expires_at == later + timedelta(seconds=1)  # type: ignore[union-attr]
    await store.transact([Put(key=key("a"), item={"n": 5})])
    assert (await store.get(key("a"))).expires_at is None  # type: ignore[union-attr]
    assert (await store.get(key("b"))).expires_at is None  # type: ignore[union-attr]


async def one_of_sixty_four_wins(store: Store) -> None:
    """Of 64 at once that want to be the first, one is; of 64 that read one version, one writes."""

    async def first(n: int) -> bool:
        while True:
            try:
                await store.transact([Put(key=key("a"), item={"n": n}, conditions=(Absent(),))])
            except Conflict:
                continue
            except ConditionFailed:
                return False
            return True

    assert sum(await asyncio.gather(*(first(n) for n in range(64)))) == 1
    stored = await store.get(key("a"))
    assert stored is not None

    async def next_one(n: int) -> bool:
        condition = VersionIs(version=stored.version)
        while True:
            try:
                await store.transact([Put(key=key("a"), item={"n": n}, conditions=(condition,))])
            except Conflict:
                continue
            except ConditionFailed:
                return False
            return True

    assert sum(await asyncio.gather(*(next_one(n) for n in range(64)))) == 1


async def sixty_four_counters_add_up(store: Store) -> None:
    """Counters lose nothing under 64 writers at once, and never pass their bound."""

    async def add() -> bool:
        while True:
            try:
                await store.transact([Update(key=key("n"), add={"n": Add(delta=1, maximum=40)})])
            except Conflict:
                continue
            except ConditionFailed:
                return False
            return True

    assert sum(await asyncio.gather(*(add() for _ in range(64)))) == 40
    assert await value(store, "n") == {"n": 40}


async def sixty_four_transfers_keep_the_sum(store: Store) -> None:
    """Money moved between accounts by 64 at once: no reader of both in one transaction sees it made or lost."""
    await store.transact([Put(key=key("x"), item={"n": 100}), Put(key=key("y"), item={"n": 100})])

    async def move(n: int) -> None:
        source, target = ("x", "y") if n % 2 else ("y", "x")
        while True:
            try:
                await store.transact(
                    [
                        Update(key=key(source), add={"n": Add(delta=-7, minimum=0)}),
                        Update(key=key(target), add={"n": Add(delta=7)}),
                    ]
                )
            except Conflict:
                continue
            except ConditionFailed:
                pass
            return

    await asyncio.gather(*(move(n) for n in range(64)))
    x, y = await value(store, "x"), await value(store, "y")
    assert x is not None
    assert y is not None
    assert x["n"] + y["n"] == 200  # type: ignore[operator]
    assert min(x["n"], y["n"]) >= 0  # type: ignore[type-var]


async def sixty_four_creates_keep_quota_and_key(store: Store) -> None:
    """64 creates at once under 16 idempotency keys and a quota of 10: as many things, entries and units as keys won."""

    async def create(n: int) -> str:
        name = f"key-{n % 16:02d}"
        while True:
            ops: list[Op] = [
                Put(key=key(name), item={"made": n}, conditions=(Absent(),)),
                Update(key=key("quota", pk="q"), add={"n": Add(delta=1, maximum=10)}),
                Put(key=key(f"{name}-{n}", pk="list"), item={"of": name}),
            ]
            try:
                await store.transact(ops)
            except Conflict:
                continue
            except ConditionFailed as error:
                current = dict(error.current.item) if error.current else None
                return f"{['key', 'quota', 'entry'][error.index]} {current}"
            return f"made {n}"

    outcomes = await asyncio.gather(*(create(n) for n in range(64)))
    made = {int(outcome.removeprefix("made ")) for outcome in outcomes if outcome.startswith("made")}
    refused = {outcome for outcome in outcomes if not outcome.startswith("made")}
    assert refused <= {"key " + str({"made": n}) for n in made} | {"quota {'n': 10}"}
    assert "quota {'n': 10}" in refused
    assert len(made) == 10
    assert len((await store.query("p")).items) == 10
    assert len((await store.query("list")).items) == 10
    quota = await store.get(key("quota", pk="q"))
    assert quota is not None
    assert quota.item == {"n": 10}


async def a_failure_beside_others_touches_none_of_them(store: Store) -> None:
    """Transactions that arrive together stand or fall each for itself."""

    async def write(n: int) -> bool:
        condition = (Exists(),) if n % 3 == 0 else (Absent(),)
        while True:
            try:
                await store.transact([Put(key=key(f"{n:02d}"), item={"n": n}, conditions=condition)])
            except Conflict:
                continue
            except ConditionFailed:
                return False
            return True

    outcomes = await asyncio.gather(*(write(n) for n in range(64)))
    assert outcomes == [n % 3 != 0 for n in range(64)]
    assert len((await store.query("p")).items) == sum(outcomes)


async def closed_is_unavailable(store: Store) -> None:
    """After `close` every call is refused; closing again is no failure."""
    await store.close()
    await store.close()
    with pytest.raises(StoreUnavailable):
        await store.get(key("a"))
    with pytest.raises(StoreUnavailable):
        await store.transact([Put(key=key("a"), item={})])


PROMISES: list[Check_] = [
    function
    for name, function in list(globals().items())
    if inspect.iscoroutinefunction(function)
    and list(inspect.signature(function).parameters) == ["store"]
    and not name.startswith("_")
]
#: Promises that an adapter without conditions must break.
CONDITIONAL = [
    absent_lets_one_in,
    exists_needs_an_item,
    versions_guard,
    attributes_guard,
    all_conditions_must_hold,
    a_transaction_is_all_or_nothing,
    counters_keep_their_bounds,
    several_counters_have_their_own_bounds,
    sixty_four_creates_keep_quota_and_key,
    one_of_sixty_four_wins,
    sixty_four_counters_add_up,
    a_failure_beside_others_touches_none_of_them,
]


@asynccontextmanager
async def opened(adapter: str, path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    """A fresh store of an adapter, closed in the end."""
    match adapter:
        case "fake":
            yield FakeStore()
        case "sqlite":
            async with SqliteStore(path / "state.db") as store:
                yield store
        case "dynamodb":
            async with dynamo_store(request.getfixturevalue("ministack")) as (store, _):
                yield store
        case _:
            raise AssertionError(adapter)


ADAPTERS = ("dynamodb", "fake", "sqlite")


@pytest.fixture(params=ADAPTERS)
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    async with opened(request.param, tmp_path, request) as store:
        yield store


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
async def test_the_adapter_keeps(store: Store, promise: Check_) -> None:
    """Every adapter keeps every promise of the port."""
    await promise(store)


# -- the suite itself --------------------------------------------------------------------------------------------------


class SqliteWithoutConditions(SqliteStore):
    """An adapter whose conditions were taken out."""

    def _refuses(self, op: Op, stored: Stored | None) -> bool:
        return False


class FakeWithoutConditions(FakeStore):
    """The same of the fake."""

    def _refuses(self, op: Op, stored: Stored | None) -> bool:
        return False


class WithoutConditions:
    """A client of DynamoDB that sends no condition."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def transact_write_items(self, **request: Any) -> Any:
        for (about,) in (item.values() for item in request["TransactItems"]):
            bare = about.pop("ConditionExpression", None)
            if bare is None:
                continue
            update = about.get("UpdateExpression", "")
            for short in list(about.get("ExpressionAttributeNames", {})):
                if not re.search(rf"{short}\b", update):
                    del about["ExpressionAttributeNames"][short]
            for short in list(about.get("ExpressionAttributeValues", {})):
                if not re.search(rf"{short}\b", update):
                    del about["ExpressionAttributeValues"][short]
            for part in ("ExpressionAttributeNames", "ExpressionAttributeValues"):
                if part in about and not about[part]:
                    del about[part]
        request["TransactItems"] = [item for item in request["TransactItems"] if "ConditionCheck" not in item]
        if not request["TransactItems"]:
            return {}
        return await self._client.transact_write_items(**request)


@pytest.mark.parametrize("promise", CONDITIONAL, ids=lambda promise: promise.__name__)
@pytest.mark.parametrize("broken", ["dynamodb", "sqlite", "fake"])
async def test_the_suite_fails_an_adapter_without_conditions(
    broken: str, promise: Check_, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The suite can fail: an adapter that ignores conditions does not pass."""
    async with AsyncExitStack() as stack:
        store: Store
        match broken:
            case "sqlite":
                store = await stack.enter_async_context(SqliteWithoutConditions(tmp_path / "s.db"))
            case "fake":
                store = FakeWithoutConditions()
            case _:
                url = request.getfixturevalue("ministack")
                store, _ = await stack.enter_async_context(dynamo_store(url, wrap=WithoutConditions))
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            await promise(store)


# -- what SQLite adds --------------------------------------------------------------------------------------------------


async def test_sqlite_keeps_what_was_answered(tmp_path: Path) -> None:
    """What was answered is there after a reopen, another connection sees it at once; the file is private."""
    path = tmp_path / "state.db"
    async with SqliteStore(path) as one, SqliteStore(path) as two:
        await one.transact([Put(key=key("a"), item={"n": 1})])
        assert await value(two, "a") == {"n": 1}
        with pytest.raises(ConditionFailed):
            await two.transact([Put(key=key("a"), item={}, conditions=(Absent(),))])
    async with SqliteStore(path) as again:
        assert await value(again, "a") == {"n": 1}
    assert path.stat().st_mode & 0o777 == 0o600


async def test_two_sqlite_connections_race_fairly(tmp_path: Path) -> None:
    """Two processes' worth of writers on one file lose no count: busy is waited for."""
    path = tmp_path / "state.db"
    async with SqliteStore(path) as one, SqliteStore(path) as two:

        async def add(store: Store) -> None:
            await store.transact([Update(key=key("n"), add={"n": Add(delta=1)})])

        await asyncio.gather(*(add(store) for _ in range(100) for store in (one, two)))
        assert await value(one, "n") == {"n": 200}


async def test_sqlite_cleans_what_expired(tmp_path: Path) -> None:
    """`clean` takes what expired and nothing else."""
    now = datetime(2026, 1, 1, tzinfo=UTC)
    async with SqliteStore(tmp_path / "state.db") as store:
        await store.transact(
            [
                Put(key=key("old"), item={}, expires_at=now - timedelta(seconds=1)),
                Put(key=key("new"), item={}, expires_at=now + timedelta(seconds=1)),
                Put(key=key("never"), item={}),
            ]
        )
        assert await store.clean(now) == 1
        assert [stored.key.sk for stored in (await store.query("p")).items] == ["never", "new"]


async def test_sqlite_refuses_what_is_no_database(tmp_path: Path) -> None:
    """A file that is no database, and one of a newer version, are refused with a typed error."""
    import sqlite3

    path = tmp_path / "state.db"
    path.write_bytes(b"not a database, but long enough to be taken for one" * 100)
    with pytest.raises(StoreUnavailable):
        SqliteStore(path)
    newer = tmp_path / "newer.db"
    connection = sqlite3.connect(newer)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(StoreUnavailable, match="schema 99"):
        SqliteStore(newer)


# -- what the fake adds ------------------------------------------------------------------------------------------------


async def test_the_fake_fails_and_loses_answers_as_scripted() -> None:
    """A scripted failure comes before the effect, a lost answer after it."""
    store = FakeStore()
    store.fail_call(1)
    with pytest.raises(StoreError):
        await store.transact([Put(key=key("a"), item={})])
    assert await value(store, "a") is None
    store.fail_call(1, after=True)
    with pytest.raises(StoreUnavailable):
        await store.transact([Put(key=key("a"), item={})])
    assert await value(store, "a") == {}
