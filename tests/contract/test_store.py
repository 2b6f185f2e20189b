"""The store port's promises, on every adapter; and the suite itself: it fails an adapter whose conditions are gone."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from provisioner.store.fake import FakeStore
from provisioner.store.port import (
    MAX_ITEM_BYTES,
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
from provisioner.store.sqlite import SqliteStore

Check_ = Callable[[Store], Awaitable[None]]


def key(sk: str, pk: str = "p") -> Key:
    return Key(pk=pk, sk=sk)


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
        "b": True,
        "none": None,
        "deep": {"l": [1, "a", {"x": []}]},
    }
    tags = frozenset({"b", "a"})
    await store.transact([Put(key=key("a"), item={**item, "tags": tags})])
    stored = await store.get(key("a"))
    assert stored is not None
    assert stored.item == {**item, "tags": tags}
    assert stored.key == key("a")
    assert await store.get(key("b")) is None


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
    await store.transact([Put(key=key("a"), item={"state": "x", "n": 1, "none": None})])
    for condition in (
        AttributeIs(name="state", value="x"),
        AttributeIs(name="none", value=None),
        AttributeIs(name="missing", value=None),
        AttributeIn(name="state", values=("w", "x")),
        AttributeIs(name="n", value=1),
    ):
        await store.transact([Check(key=key("a"), conditions=(condition,))])
    for condition in (
        AttributeIs(name="state", value="y"),
        AttributeIs(name="state", value=None),
        AttributeIs(name="missing", value="x"),
        AttributeIn(name="state", values=("y",)),
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
    assert [stored.key.sk for stored in (await store.query("p")).items] == ["a"]


async def a_token_makes_a_repeat_harmless(store: Store) -> None:
    """The same operations under the same token are written once; other operations under it are refused."""
    ops = [Update(key=key("a"), add={"n": Add(delta=1)}, insert={"s": frozenset({"y", "x"})})]
    for _ in range(3):
        await store.transact(ops, token="t1")
    assert (await value(store, "a") or {})["n"] == 1
    with pytest.raises(TokenReused):
        await store.transact([Update(key=key("a"), add={"n": Add(delta=2)})], token="t1")
    await store.transact(ops, token="t2")
    assert (await value(store, "a") or {})["n"] == 2


async def a_failed_transaction_does_not_use_its_token(store: Store) -> None:
    """A token whose transaction wrote nothing can be used again."""
    op = Put(key=key("a"), item={}, conditions=(Exists(),))
    with pytest.raises(ConditionFailed):
        await store.transact([op], token="t")
    await store.transact([Put(key=key("a"), item={"n": 1})])
    await store.transact([op], token="t")
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
    assert (await store.get(key("b"))).expires_at is None  # type: ignore[union-attr]


async def one_of_sixty_four_wins(store: Store) -> None:
    """Of 64 at once that want to be the first, one is; of 64 that read one version, one writes."""

    async def first(n: int) -> bool:
        try:
            await store.transact([Put(key=key("a"), item={"n": n}, conditions=(Absent(),))])
        except ConditionFailed:
            return False
        return True

    assert sum(await asyncio.gather(*(first(n) for n in range(64)))) == 1
    stored = await store.get(key("a"))
    assert stored is not None

    async def next_one(n: int) -> bool:
        try:
            await store.transact(
                [Put(key=key("a"), item={"n": n}, conditions=(VersionIs(version=stored.version),))]
            )
        except (ConditionFailed, Conflict):
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


async def a_failure_beside_others_touches_none_of_them(store: Store) -> None:
    """Transactions that arrive together stand or fall each for itself."""

    async def write(n: int) -> bool:
        condition = (Exists(),) if n % 3 == 0 else (Absent(),)
        try:
            await store.transact([Put(key=key(f"{n:02d}"), item={"n": n}, conditions=condition)])
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
    one_of_sixty_four_wins,
    sixty_four_counters_add_up,
    a_failure_beside_others_touches_none_of_them,
]

Opener = Callable[[Path], Store]
ADAPTERS: dict[str, Opener] = {
    "sqlite": lambda path: SqliteStore(path / "state.db"),
    "fake": lambda path: FakeStore(),
}


@pytest.fixture(params=sorted(ADAPTERS))
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    opened = ADAPTERS[request.param](tmp_path)
    yield opened
    await opened.close()


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


@pytest.mark.parametrize("promise", CONDITIONAL, ids=lambda promise: promise.__name__)
@pytest.mark.parametrize("broken", ["sqlite", "fake"])
async def test_the_suite_fails_an_adapter_without_conditions(
    broken: str, promise: Check_, tmp_path: Path
) -> None:
    """The suite can fail: an adapter that ignores conditions does not pass."""
    opened: Store = (
        SqliteWithoutConditions(tmp_path / "s.db") if broken == "sqlite" else FakeWithoutConditions()
    )
    try:
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            await promise(opened)
    finally:
        await opened.close()


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
