"""Snapshots: the writable layer as a new layer, frozen while it is copied, uploaded after."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from runtime_image.agent.clock import Clock
from runtime_image.agent.control import ControlPlane
from runtime_image.agent.errors import detail_of
from runtime_image.agent.hosted import Hosted
from runtime_image.agent.layer_store import LayerStore
from runtime_image.agent.ports import RuntimePort
from runtime_image.agent.sandboxes import SandboxRuntimeError
from runtime_image.agent.transfer import Transfer, TransferError
from runtime_image.layers import (
    LayerError,
    LayerIndex,
    PackedLayer,
    ParentMismatch,
    PathGlobs,
    Without,
    copy_tree,
    delta,
    flush,
    index,
    pack,
    remove_tree,
    squash,
)
from shoal.contract.base import SessionId, SnapshotId
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.host import SnapshotTake, SnapshotTaken
from shoal.contract.images import MAX_LAYERS, Layer
from shoal.contract.urls import LayerPut

_log = structlog.get_logger()


@dataclass(kw_only=True, eq=False)
class Taking:
    """One snapshot on its way. `layers`, `index`: what this sandbox's next one builds on, once it is uploaded."""

    take: SnapshotTake
    hosted: Hosted
    taken: SnapshotTaken
    index: LayerIndex | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait(self, timeout_s: float) -> SnapshotTaken:
        """How far it is: at its end, or after `timeout_s` seconds."""
        if timeout_s > 0 and not self.done.is_set():
            try:
                async with asyncio.timeout(timeout_s):
                    await self.done.wait()
            except TimeoutError:
                pass
        return self.taken

    def now(self, **changes: object) -> None:
        """Change what is reported."""
        self.taken = self.taken.model_copy(update=changes)


@dataclass(frozen=True, kw_only=True)
class _Copied:
    """What was copied while the sandbox stood still: a tree over `below`."""

    tree: Path
    below: tuple[Layer, ...]
    index: LayerIndex


class Snapshots:
    """Takes the snapshots of this host's sandboxes, one at a time each, and reports them until they are forgotten."""

    def __init__(
        self,
        *,
        find: Callable[[SessionId], Hosted],
        runtime: RuntimePort,
        layers: LayerStore,
        control: ControlPlane,
        transfer: Transfer,
        staging: Path,
        clock: Clock,
        nudge: Callable[[], None],
    ) -> None:
        self._find = find
        self._runtime = runtime
        self._layers = layers
        self._control = control
        self._transfer = transfer
        self._staging = staging
        self._clock = clock
        self._nudge = nudge
        self._all: dict[SnapshotId, Taking] = {}
        self._last: dict[Hosted, Taking] = {}
        self._locks: dict[Hosted, asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.taken = self.failed = 0
        if staging.exists():
            remove_tree(staging)
        staging.mkdir(parents=True, mode=0o700)

    async def take(self, session: SessionId, take: SnapshotTake) -> Taking:
        """Begin a snapshot, or find the one of that id.

        Raises:
            ShoalError: Why this sandbox has none: not here, not running, another epoch.
        """
        known = self._all.get(take.snapshot)
        if known is not None:
            if known.hosted.session != session:
                raise ShoalError(ErrorCode.CONFLICT, "That snapshot is of another session.")
            return known
        hosted = self._find(session)
        if hosted.epoch != take.epoch:
            raise ShoalError(
                ErrorCode.EPOCH_MISMATCH,
                f"This host runs epoch {hosted.epoch} of that session.",
                details={"epoch": hosted.epoch},
            )
        hosted.require_running()
        taking = Taking(
            take=take,
            hosted=hosted,
            taken=SnapshotTaken(
                snapshot=take.snapshot,
                session=session,
                epoch=take.epoch,
                state="copying",
                image_digest=hosted.spec.source.image_digest,
                config=hosted.spec.source.config,
            ),
        )
        self._all[take.snapshot] = taking
        task = asyncio.create_task(self._run(taking))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return taking

    def get(self, session: SessionId, snapshot: str) -> Taking:
        """The snapshot of that id.

        Raises:
            ShoalError: `not_found`.
        """
        taking = self._all.get(SnapshotId(snapshot))
        if taking is None or taking.hosted.session != session:
            raise ShoalError(ErrorCode.NOT_FOUND, "This host knows no such snapshot.")
        return taking

    def report(self) -> list[SnapshotTaken]:
        """All that are not forgotten."""
        return [taking.taken for taking in self._all.values()]

    def forget(self, snapshots: Iterable[SnapshotId]) -> None:
        """They are recorded elsewhere. One that is on its way is kept."""
        for id in snapshots:
            taking = self._all.get(id)
            # The last of a living sandbox stays: the next one builds on it.
            if taking is None or not taking.done.is_set():
                continue
            if taking.hosted.over or self._last.get(taking.hosted) is not taking:
                del self._all[id]
        for hosted in [hosted for hosted in self._last if hosted.over]:
            del self._last[hosted]
            self._locks.pop(hosted, None)

    def index_of(self, hosted: Hosted, snapshot: str) -> LayerIndex | None:
        """The index of a sandbox's writable layer at a snapshot of it."""
        taking = self._all.get(SnapshotId(snapshot))
        return taking.index if taking is not None and taking.hosted is hosted else None

    async def close(self) -> None:
        """Break off what is on its way."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    async def _run(self, taking: Taking) -> None:
        hosted, directory = taking.hosted, self._staging / taking.take.snapshot
        began = self._clock.monotonic()
        try:
            async with self._locks.setdefault(hosted, asyncio.Lock()):
                hosted.using += 1
                try:
                    directory.mkdir(mode=0o700)
                    await self._take(taking, directory)
                finally:
                    hosted.using -= 1
                    hosted.touch()
        except ShoalError as error:
            self._fail(taking, error)
        except (LayerError, TransferError, SandboxRuntimeError, OSError, TimeoutError) as error:
            self._fail(
                taking,
                ShoalError(
                    ErrorCode.SNAPSHOT_FAILED,
                    "The snapshot failed and left nothing.",
                    details={"reason": f"{type(error).__name__}: {error}"[:500]},
                ),
            )
        except asyncio.CancelledError:
            self._fail(
                taking,
                ShoalError(ErrorCode.SNAPSHOT_FAILED, "The host is going.", details={"reason": "shutdown"}),
            )
            raise
        except Exception as error:  # noqa: BLE001 - the task's own loop: logged, and told as failed
            _log.exception("snapshot.failed", session_id=hosted.session, snapshot=taking.take.snapshot)
            reason = type(error).__name__
            self._fail(
                taking,
                ShoalError(ErrorCode.SNAPSHOT_FAILED, "The snapshot failed.", details={"reason": reason}),
            )
        else:
            self.taken += 1
            _log.info(
                "snapshot.taken",
                session_id=hosted.session,
                epoch=hosted.epoch,
                snapshot=taking.take.snapshot,
                size_bytes=taking.taken.size_bytes,
                frozen_ms=taking.taken.frozen_ms,
                duration_ms=round((self._clock.monotonic() - began) * 1000, 3),
            )
        finally:
            await asyncio.to_thread(_remove, directory)
            taking.done.set()
            self._nudge()

    def _fail(self, taking: Taking, error: ShoalError) -> None:
        self.failed += 1
        taking.index = None
        taking.now(state="failed", error=detail_of(error), layers=[], size_bytes=0)
        _log.warning(
            "snapshot.failed",
            session_id=taking.hosted.session,
            snapshot=taking.take.snapshot,
            code=error.code.value,
            reason=error.details.get("reason"),
        )

    async def _take(self, taking: Taking, directory: Path) -> None:
        hosted = taking.hosted
        copied = await self._copy(taking, directory)
        taking.now(state="uploading")
        blob, exclude = directory / "blob", taking.take.exclude
        packed = await asyncio.to_thread(_pack, copied.tree, blob, exclude)
        layer = Layer(
            digest=packed.digest,
            diff_id=packed.diff_id,
            size_bytes=packed.size_bytes,
            role="snapshot",
            name=taking.take.snapshot,
        )
        (url,) = await self._control.urls([LayerPut(digest=layer.digest, size_bytes=layer.size_bytes)])
        await self._transfer.put(url, blob)
        cache = self._layers.cache
        if exclude:
            await asyncio.to_thread(cache.ensure, layer.digest, lambda into: _move(blob, into))
        else:
            await asyncio.to_thread(cache.adopt, layer.digest, copied.tree)
        self._layers.changed()
        taking.index = copied.index
        taking.now(state="uploaded", layers=[*copied.below, layer], size_bytes=layer.size_bytes)
        if not exclude:
            # What was left out of this one must come with the next.
            self._last[hosted] = taking

    async def _copy(self, taking: Taking, directory: Path) -> _Copied:
        hosted = taking.hosted
        hosted.require_running()
        assert hosted.sandbox is not None
        assert hosted.stack is not None
        upper, stack, parent = hosted.sandbox.upper, hosted.stack, self._last.get(hosted)
        # Most dirty pages go out before anything stands still.
        await asyncio.to_thread(flush, upper)
        began = self._clock.monotonic()
        async with hosted.frozen(self._runtime, taking.take.snapshot):
            began_frozen = self._clock.monotonic()
            open_ids = hosted.actions.open_ids() if hosted.actions is not None else []
            taking.now(seq=_settled_seq(hosted), open_actions=open_ids)
            parent_layers = tuple(parent.taken.layers) if parent is not None else ()
            if parent is not None and parent.index is not None and len(parent_layers) < MAX_LAYERS:
                try:
                    made = await asyncio.to_thread(delta, upper, parent.index, directory / "tree")
                except ParentMismatch:
                    await asyncio.to_thread(_remove, directory / "tree")
                else:
                    copied = _Copied(tree=directory / "tree", below=parent_layers, index=made.index)
                    taking.now(frozen_ms=_ms(self._clock, began_frozen))
                    return copied
            whole = await asyncio.to_thread(_copy_whole, upper, directory / "tree")
            taking.now(frozen_ms=_ms(self._clock, began_frozen))
        _log.debug("snapshot.copied", snapshot=taking.take.snapshot, duration_ms=_ms(self._clock, began))
        if len(stack.layers) < MAX_LAYERS:
            return _Copied(tree=directory / "tree", below=stack.layers, index=whole)
        keep = _squash_from(stack.layers)
        trees = (*stack.paths[keep:], directory / "tree")
        await asyncio.to_thread(squash, trees, directory / "squashed")
        return _Copied(tree=directory / "squashed", below=stack.layers[:keep], index=whole)


def _ms(clock: Clock, since: float) -> float:
    return round((clock.monotonic() - since) * 1000, 3)


def _settled_seq(hosted: Hosted) -> int:
    """The last step that has ended: the disk holds it whole."""
    settled = [entry.seq for entry in hosted.journal.entries() if entry.result is not None]
    return max(settled) if settled else hosted.disk_seq_at_start


def _copy_whole(upper: Path, into: Path) -> LayerIndex:
    taken = index(upper)
    copy_tree(upper, into)
    return taken


def _squash_from(layers: Sequence[Layer]) -> int:
    """From which layer on a full stack is squashed: the snapshots on top, at least the upper half."""
    first = next((n for n, layer in enumerate(layers) if layer.role == "snapshot"), len(layers))
    return min(first, len(layers) // 2) if first > MAX_LAYERS - 2 else first


def _pack(tree: Path, blob: Path, exclude: Sequence[str]) -> PackedLayer:
    with blob.open("wb") as out:
        return pack(tree, out, keep=Without(PathGlobs(exclude)) if exclude else None)


def _remove(path: Path) -> None:
    if path.exists():
        remove_tree(path)


def _move(source: Path, target: Path) -> None:
    source.rename(target)
