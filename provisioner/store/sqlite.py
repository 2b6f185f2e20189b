"""The store on one machine: SQLite in WAL mode.

One thread writes and one reads, each with its own connection, so the event loop never waits for the disk. Transactions
that arrive while one is being written are committed together (a savepoint each), which is what makes bursts cheap.
"""

from __future__ import annotations

import asyncio
import os
import queue
import secrets
import sqlite3
import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from provisioner.store.port import (
    TOKEN_LIFE_S,
    Check,
    ConditionFailed,
    Conflict,
    Delete,
    Item,
    Key,
    Op,
    Page,
    Put,
    Stored,
    StoreError,
    StoreUnavailable,
    TokenReused,
    Update,
    Value,
)
from provisioner.store.rules import (
    check_ops,
    check_query,
    check_sizes,
    decode,
    encode,
    failed,
    fingerprint,
    next_version,
    updated,
    whole_seconds,
)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS items (
    pk TEXT NOT NULL, sk TEXT NOT NULL, version INTEGER NOT NULL, body TEXT NOT NULL, expires_at REAL,
    PRIMARY KEY (pk, sk)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS items_expiring ON items (expires_at) WHERE expires_at IS NOT NULL;
CREATE TABLE IF NOT EXISTS tokens (token TEXT PRIMARY KEY, digest TEXT NOT NULL, at REAL NOT NULL) WITHOUT ROWID;
"""
#: Kept in the database's own header; a newer one than this program knows is refused.
SCHEMA_VERSION = 1
_BUSY_MS = 10_000
_MAX_GROUP = 64

_GET = "SELECT version, body, expires_at FROM items WHERE pk = ? AND sk = ?"
_PUT = "INSERT OR REPLACE INTO items (pk, sk, version, body, expires_at) VALUES (?, ?, ?, ?, ?)"
_DELETE = "DELETE FROM items WHERE pk = ? AND sk = ?"

_Job = tuple[Callable[[sqlite3.Connection], Any], asyncio.AbstractEventLoop, "asyncio.Future[Any]"]


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path, timeout=_BUSY_MS / 1000, isolation_level=None, check_same_thread=False, cached_statements=256
    )
    connection.execute(f"PRAGMA busy_timeout = {_BUSY_MS}")
    connection.execute("PRAGMA journal_mode = WAL")
    # A crash of the program loses nothing; a power cut may lose the last moments, and with them the sandboxes.
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA cache_size = -16384")
    return connection


def _typed(error: sqlite3.Error) -> StoreError:
    code = getattr(error, "sqlite_errorname", "")
    if code.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return Conflict(str(error))
    return StoreUnavailable(f"{code or type(error).__name__}: {error}")


def _resolve(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


class _Worker:
    """A thread with its own connection. `grouped` wraps what waits together in one SQLite transaction."""

    def __init__(self, path: Path, name: str, *, grouped: bool) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._connection = _connect(path)
        self._grouped = grouped
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def call(self, job: Callable[[sqlite3.Connection], Any]) -> Any:
        if self._closed:
            raise StoreUnavailable("the store is closed")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._jobs.put((job, loop, future))
        return await future

    def stop(self) -> None:
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
            self._thread.join()
            self._connection.close()

    def _run(self) -> None:
        while True:
            first = self._jobs.get()
            if first is None:
                return
            jobs = [first]
            stopping = False
            while len(jobs) < _MAX_GROUP and not self._jobs.empty():
                more = self._jobs.get()
                if more is None:
                    stopping = True
                    break
                jobs.append(more)
            outcomes = self._write(jobs) if self._grouped else [self._one(job) for job, _, _ in jobs]
            for (_, loop, future), (result, error) in zip(jobs, outcomes, strict=True):
                try:
                    loop.call_soon_threadsafe(_resolve, future, result, error)
                except RuntimeError:
                    # The loop that asked is gone; so is whoever waited.
                    continue
            if stopping:
                return

    def _one(self, job: Callable[[sqlite3.Connection], Any]) -> tuple[Any, BaseException | None]:
        try:
            return job(self._connection), None
        except sqlite3.Error as error:
            return None, _typed(error)
        except Exception as error:  # noqa: BLE001 - a thread's top: it is handed to whoever asked
            return None, error

    def _write(self, jobs: list[_Job]) -> list[tuple[Any, BaseException | None]]:
        outcomes: list[tuple[Any, BaseException | None]] = []
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            for job, _, _ in jobs:
                self._connection.execute("SAVEPOINT one")
                outcome = self._one(job)
                if outcome[1] is not None:
                    self._connection.execute("ROLLBACK TO one")
                self._connection.execute("RELEASE one")
                outcomes.append(outcome)
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            return [(None, _typed(error))] * len(jobs)
        return outcomes


class SqliteStore:
    """The `Store` port over one SQLite file, made (with mode 0600) when it is missing.

    Several processes may open the same file. Items whose `expires_at` has passed go with `clean`.
    """

    def __init__(self, path: Path) -> None:
        """Open the file.

        Raises:
            StoreUnavailable: It cannot be opened, is no database, or was written by a newer version.
        """
        try:
            if not path.exists():
                os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            connection = _connect(path)
            try:
                version = connection.execute("PRAGMA user_version").fetchone()[0]
                if version > SCHEMA_VERSION:
                    raise StoreUnavailable(
                        f"{path} has schema {version}; this version knows {SCHEMA_VERSION}"
                    )
                connection.executescript(_SCHEMA)
                connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            finally:
                connection.close()
            self._writer = _Worker(path, "store-writer", grouped=True)
            self._reader = _Worker(path, "store-reader", grouped=False)
        except (sqlite3.Error, OSError) as error:
            raise StoreUnavailable(f"{path}: {error}") from error

    async def __aenter__(self) -> SqliteStore:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def get(self, key: Key) -> Stored | None:
        """As the port says."""
        result: Stored | None = await self._reader.call(lambda connection: _read(connection, key))
        return result

    async def get_many(self, keys: Sequence[Key]) -> list[Stored | None]:
        """As the port says."""
        if not keys:
            return []
        result: list[Stored | None] = await self._reader.call(
            lambda connection: [_read(connection, key) for key in keys]
        )
        return result

    async def query(
        self, pk: str, *, prefix: str = "", after: str | None = None, limit: int = 100, reverse: bool = False
    ) -> Page:
        """As the port says."""
        check_query(pk, after, limit)
        clauses, values = ["pk = ?"], [pk]
        if prefix:
            clauses.append("sk >= ?")
            values.append(prefix)
            above = _above(prefix)
            if above is not None:
                clauses.append("sk < ?")
                values.append(above)
        if after is not None:
            clauses.append("sk < ?" if reverse else "sk > ?")
            values.append(after)
        sql = (
            f"SELECT sk, version, body, expires_at FROM items WHERE {' AND '.join(clauses)} "
            f"ORDER BY sk {'DESC' if reverse else 'ASC'} LIMIT {limit + 1}"
        )

        def job(connection: sqlite3.Connection) -> Page:
            rows = connection.execute(sql, values).fetchall()
            items = tuple(_stored(Key(pk=pk, sk=row[0]), row[1], row[2], row[3]) for row in rows[:limit])
            return Page(items=items, after=items[-1].key.sk if len(rows) > limit else None)

        page: Page = await self._reader.call(job)
        return page

    async def transact(self, ops: Sequence[Op], *, token: str | None = None) -> None:
        """As the port says."""
        check_ops(ops)
        ops = tuple(ops)
        await self._writer.call(lambda connection: self._apply(connection, ops, token))

    async def clean(self, now: datetime, *, limit: int = 1000) -> int:
        """Take away up to `limit` items that expired before `now`, and old tokens; answers how many items."""

        def job(connection: sqlite3.Connection) -> int:
            connection.execute("DELETE FROM tokens WHERE at < ?", (now.timestamp() - TOKEN_LIFE_S,))
            return connection.execute(
                "DELETE FROM items WHERE (pk, sk) IN (SELECT pk, sk FROM items "
                "WHERE expires_at IS NOT NULL AND expires_at < ? LIMIT ?)",
                (now.timestamp(), limit),
            ).rowcount

        count: int = await self._writer.call(job)
        return count

    async def close(self) -> None:
        """As the port says."""
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        self._writer.stop()
        self._reader.stop()

    def _apply(self, connection: sqlite3.Connection, ops: tuple[Op, ...], token: str | None) -> None:
        if token is not None and self._repeated(connection, ops, token):
            return
        written: list[tuple[Key, Item, str, bool]] = []
        for index, op in enumerate(ops):
            stored = _read(connection, op.key)
            if self._refuses(op, stored):
                raise ConditionFailed(index, stored)
            match op:
                case Put():
                    written.append(self._store(connection, op, dict(op.item), stored, op.expires_at))
                case Update():
                    expires_at = op.expires_at or (stored.expires_at if stored else None)
                    written.append(self._store(connection, op, updated(op, stored), stored, expires_at))
                case Delete():
                    connection.execute(_DELETE, (op.key.pk, op.key.sk))
                case Check():
                    pass
        check_sizes(written)

    def _refuses(self, op: Op, stored: Stored | None) -> bool:
        return failed(op, stored)

    def _repeated(self, connection: sqlite3.Connection, ops: tuple[Op, ...], token: str) -> bool:
        digest = fingerprint(ops)
        now = datetime.now(UTC).timestamp()
        row = connection.execute("SELECT digest, at FROM tokens WHERE token = ?", (token,)).fetchone()
        if row is not None and row[1] >= now - TOKEN_LIFE_S:
            if row[0] != digest:
                raise TokenReused(f"token {token} was used for other operations")
            return True
        connection.execute("INSERT OR REPLACE INTO tokens VALUES (?, ?, ?)", (token, digest, now))
        return False

    def _store(
        self,
        connection: sqlite3.Connection,
        op: Put | Update,
        item: Item,
        stored: Stored | None,
        expires_at: datetime | None,
    ) -> tuple[Key, Item, str, bool]:
        body = encode(item)
        version = next_version(op, stored, secrets.randbits(48))
        expires_at = whole_seconds(expires_at)
        connection.execute(
            _PUT, (op.key.pk, op.key.sk, version, body, expires_at.timestamp() if expires_at else None)
        )
        return op.key, item, body, expires_at is not None


def _stored(key: Key, version: int, body: str, expires_at: float | None) -> Stored:
    item: dict[str, Value] = decode(body)
    when = datetime.fromtimestamp(expires_at, UTC) if expires_at is not None else None
    return Stored(key=key, item=item, version=version, expires_at=when)


def _read(connection: sqlite3.Connection, key: Key) -> Stored | None:
    row = connection.execute(_GET, (key.pk, key.sk)).fetchone()
    return None if row is None else _stored(key, row[0], row[1], row[2])


def _above(prefix: str) -> str | None:
    """The least string above all that start with `prefix`; None when there is none."""
    for end in range(len(prefix) - 1, -1, -1):
        code = ord(prefix[end])
        if code < 0x10FFFF:
            # Surrogates are no characters; the next one after them is.
            following = 0xE000 if code + 1 == 0xD800 else code + 1
            return prefix[:end] + chr(following)
    return None
