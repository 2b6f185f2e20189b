"""Making many sessions in one call: the quota of all is taken once, then they are written in chunks.

A note of the group is there from the moment the quota is taken until all are written, so that a repeat of the call, or
the reconciler when the maker died, finishes the same sessions: their ids are derived from the group's.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from provisioner import keys, quota
from provisioner.auth import Principal
from provisioner.context import Context, log
from provisioner.lifecycle import LIVE
from provisioner.manifests import Resolved
from provisioner.model import Group, Session, dump, load, replace
from provisioner.sessions import records
from provisioner.sessions.create import Creating, Made, key_conflict
from provisioner.store.port import Absent, Check, ConditionFailed, Delete, Key, Op, Put
from shoal.contract.base import SessionId
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.sessions import SessionCreate

#: The most operations of one transaction, of three to five a session: some room below the port's limit.
CHUNK_OPS = 90
#: How often the quota is asked for again when others were quicker.
_TRIES = 50
#: Seconds after which another replica finishes a group that its maker left.
STALE_S = 30.0

Outcome = Resolved | Made | ShoalError


class Groups:
    """Makes sessions by the many."""

    def __init__(self, context: Context, creating: Creating) -> None:
        self._context = context
        self._creating = creating

    async def make(
        self, who: Principal, bodies: list[SessionCreate], hashed: str, key: str | None
    ) -> list[Made | ShoalError]:
        """Make them, in the order asked; bodies that are alike are the same object.

        What is wrong with one of them (an image that is not there) is that item's error; the others are made.

        Raises:
            ShoalError: QUOTA_EXCEEDED for all together; IDEMPOTENCY_CONFLICT.
        """
        context = self._context
        id = keys.derived_id("grp", who.tenant, key) if key is not None else context.ids("grp")
        stored = await context.store.get(keys.group(id))
        outcomes = await self._resolve(who, bodies, hashed)
        fresh = [index for index, outcome in enumerate(outcomes) if isinstance(outcome, Resolved)]
        grants = dict.fromkeys(fresh, 0)
        if stored is not None:
            group = load(Group, stored.item)
            if group.request_hash != hashed:
                raise key_conflict()
            grants = _grants(group)
        elif fresh:
            first = await records.read(context.store, _session_id(id, fresh[0]))
            if first is None:
                grants = _grants(await self._begin(who, id, bodies, hashed, outcomes))
            elif first.session.request_hash != hashed:
                raise key_conflict()
        made = await self._write(who, id, bodies, hashed, outcomes, grants)
        return [made[index] if index in made else _as_made(outcome) for index, outcome in enumerate(outcomes)]

    async def resume(self, group: Group) -> None:
        """Finish what the maker of a group left undone; what is made waits in the queue."""
        who = Principal(tenant=group.tenant, key=group.key_id, scopes=frozenset())
        bodies = _unpacked(group)
        outcomes = await self._resolve(who, bodies, group.request_hash, named=False)
        await self._write(who, group.id, bodies, group.request_hash, outcomes, _grants(group))
        log.info("group.resumed", group=group.id, count=group.count)
        self._context.wake_queue.set()

    async def _resolve(
        self, who: Principal, bodies: list[SessionCreate], hashed: str, *, named: bool = True
    ) -> list[Outcome]:
        """What each body starts from, the live session that has its name already, or what is wrong with it."""
        outcomes: list[Outcome] = []
        names = await self._names(who, bodies, hashed) if named else {}
        last: tuple[SessionCreate, Resolved | ShoalError] | None = None
        for index, body in enumerate(bodies):
            if index in names:
                outcomes.append(names[index])
                continue
            if last is None or last[0] is not body:
                last = (body, await self._one(who, body))
            outcomes.append(last[1])
        return outcomes

    async def _one(self, who: Principal, body: SessionCreate) -> Resolved | ShoalError:
        try:
            self._creating.pool(body)
            resolved = await self._context.pins.resolve(who.tenant, body.run, body.image, body.snapshot)
            self._creating.resources(body, resolved)
        except ShoalError as error:
            return error
        return resolved

    async def _names(self, who: Principal, bodies: list[SessionCreate], hashed: str) -> dict[int, Made]:
        wanted = {
            index: keys.name(who.tenant, body.run, name)
            for index, body in enumerate(bodies)
            if (name := _name(body, bodies, index)) is not None
        }
        found = await self._context.store.get_many(list(wanted.values()))
        ids = {
            index: SessionId(stored.item["session"])
            for index, stored in zip(wanted, found, strict=True)
            if stored is not None and stored.item["request_hash"] == hashed
        }
        sessions = await self._context.store.get_many([keys.session(id) for id in ids.values()])
        made: dict[int, Made] = {}
        for index, stored in zip(ids, sessions, strict=True):
            if stored is None:
                continue
            loaded = records.loaded(stored)
            if loaded.session.state in LIVE:
                made[index] = Made(session=loaded.session, version=loaded.version, created=False)
        return made

    async def _begin(
        self, who: Principal, id: str, bodies: list[SessionCreate], hashed: str, outcomes: list[Outcome]
    ) -> Group:
        """Take the quota of all and leave a note of what is to be made; answers the note that is there.

        Raises:
            ShoalError: QUOTA_EXCEEDED, IDEMPOTENCY_CONFLICT, UNAVAILABLE.
        """
        grants = self._creating.grants
        good = {index: out for index, out in enumerate(outcomes) if isinstance(out, Resolved)}
        group = Group(
            id=id,
            tenant=who.tenant,
            key_id=who.key,
            request_hash=hashed,
            body=_packed(bodies),
            count=len(bodies),
            indexes=tuple(good),
            grants=tuple(await grants.parts(who.tenant, id, len(good))),
            created_at=self._context.clock.now(),
        )
        resources = [self._creating.resources(bodies[index], out) for index, out in good.items()]
        for _ in range(_TRIES):
            takes: list[Op] = []
            begin = 0
            for shard, count in group.grants:
                part = quota.needed(resources[begin : begin + count])
                takes.append(quota.take(who.tenant, shard, part))
                begin += count
            ops: list[Op] = [
                Put(key=keys.group(id), item=dump(group), conditions=(Absent(),)),
                # A repeat of this call may have finished between our look and now; its quota is taken.
                Check(key=keys.session(_session_id(id, min(good))), conditions=(Absent(),)),
                *takes,
            ]
            try:
                await self._context.store.transact(ops)
            except ConditionFailed as error:
                if error.index < 2:
                    known = error.current.item["request_hash"] if error.current else None
                    if known != hashed:
                        raise key_conflict() from error
                    there = error.current if error.index == 0 else None
                    return load(Group, there.item) if there is not None else group
                parts = await grants.room_for_group(
                    who.tenant, id, [quota.needed([one]) for one in resources]
                )
                group = replace(group, grants=tuple(parts))
            else:
                return group
        raise ShoalError(
            ErrorCode.UNAVAILABLE, "The tenant's quota is much asked for; try again.", retry_after_s=0.5
        )

    async def _write(
        self,
        who: Principal,
        id: str,
        bodies: list[SessionCreate],
        hashed: str,
        outcomes: list[Outcome],
        grants: Mapping[int, int],
    ) -> dict[int, Made]:
        context, creating = self._context, self._creating
        made: dict[int, Made] = {}
        waiting: list[tuple[int, Session]] = []
        for index, (body, outcome) in enumerate(zip(bodies, outcomes, strict=True)):
            if isinstance(outcome, Resolved) and index in grants:
                resources = creating.resources(body, outcome)
                name = _name(body, bodies, index)
                session = creating.record(
                    who, body, hashed, _session_id(id, index), name, outcome.source, resources
                )
                session = replace(await creating.spread(session), grant=grants[index])
                waiting.append((index, session))
                context.demand.note(session.pool, session.source, session.substrate, resources)
        while waiting:
            chunk: list[tuple[int, Session]] = []
            ops: list[Op] = []
            while waiting:
                more = records.insertion(waiting[0][1], quota=None)
                if len(ops) + len(more) > CHUNK_OPS:
                    break
                ops += more
                chunk.append(waiting.pop(0))
            try:
                await context.store.transact(ops)
                made |= {index: Made(session=session, version=1, created=True) for index, session in chunk}
            except ConditionFailed:
                # Some are there already (a repeat, or a resumed group): one by one.
                for index, session in chunk:
                    made[index] = await self._single(id, session)
        await context.store.transact([Delete(key=keys.group(id))])
        return made

    async def _single(self, id: str, session: Session) -> Made:
        made = await self._creating.insert(session, takes=False)
        if made.session.id != session.id:
            # An older session has its name: the quota taken for this one goes back, once.
            marker = Put(
                key=Key(pk=f"GROUP#{id}", sk=session.id),
                item={},
                conditions=(Absent(),),
                expires_at=self._context.clock.now() + timedelta(days=30),
            )
            try:
                await self._context.store.transact([marker, records.give_back(session)])
            except ConditionFailed:
                pass
        return made


def _session_id(group: str, index: int) -> SessionId:
    return SessionId(keys.derived_id("ses", group, str(index)))


def _grants(group: Group) -> dict[int, int]:
    """Which shard of the quota each of a group's sessions takes of."""
    shards = [shard for shard, count in group.grants for _ in range(count)]
    return dict(zip(group.indexes, shards, strict=True))


def _name(body: SessionCreate, bodies: list[SessionCreate], index: int) -> str | None:
    """A name for many becomes `name/0`, `name/1`, ..."""
    if body.name is None or body.count == 1:
        return body.name
    return f"{body.name}/{index}"


def _packed(bodies: list[SessionCreate]) -> str:
    alike = all(body is bodies[0] for body in bodies)
    # What was left out stays left out: a default is not something that was asked for.
    return "\n".join(body.model_dump_json(exclude_unset=True) for body in (bodies[:1] if alike else bodies))


def _unpacked(group: Group) -> list[SessionCreate]:
    bodies = [SessionCreate.model_validate_json(part) for part in group.body.split("\n")]
    return bodies * group.count if len(bodies) == 1 else bodies


def _as_made(outcome: Outcome) -> Made | ShoalError:
    if isinstance(outcome, Resolved):
        return ShoalError(
            ErrorCode.CONFLICT, "Its name was in use when the group was made; repeat with another key."
        )
    return outcome
