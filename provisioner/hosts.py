"""What hosts ask of the control plane: the use cases behind the internal routes (heartbeats in `heartbeats`)."""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import Literal

from provisioner import keys, spread
from provisioner.auth import hash_secret
from provisioner.blob_errors import told
from provisioner.blobs import names
from provisioner.blobs.port import BlobError
from provisioner.context import Context, log
from provisioner.departure import Departure
from provisioner.heartbeats import Heartbeats
from provisioner.lifecycle import HOST, UNPLACED, move
from provisioner.model import Host, HostOrders, Queued, dump, load, replace
from provisioner.sessions import records
from provisioner.store.port import ConditionFailed, Put, Stored, VersionIs
from provisioner.transfers import Transfers
from shoal.contract.base import HostId, SessionId, TenantId
from shoal.contract.errors import ErrorCode, ShoalError
from shoal.contract.host import Heartbeat, HeartbeatReply, Register, Registered
from shoal.contract.states import HostState
from shoal.contract.urls import (
    JournalGet,
    JournalPut,
    LayerGet,
    LayerPut,
    TransferGet,
    TransferPut,
    Url,
    UrlAsked,
    Urls,
    UrlsAsked,
)

_GONE = frozenset({HostState.LOST, HostState.GONE})
#: Seconds for which a presigned URL is good.
_URL_S = 900.0


def _host_token(id: HostId, body: Register) -> str:
    """What the host proves itself by from now on: of its join token and its boot id, which no one else has both."""
    digest = hmac.digest(body.join_token.encode(), f"host\0{body.boot_id}".encode(), hashlib.sha256)
    return f"{id}.{base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}"


class Hosts:
    """What the internal routes call."""

    def __init__(
        self, context: Context, heartbeats: Heartbeats, departure: Departure, transfers: Transfers
    ) -> None:
        self._context = context
        self._heartbeats = heartbeats
        self._departure = departure
        self._transfers = transfers
        self._tokens: dict[HostId, str] = {}
        self._readable: dict[HostId, set[str]] = {}

    async def register(self, body: Register) -> Registered:
        """A host introduces itself with its one-time join token; the same boot may repeat it, and gets the same
        token of its own: a try that was given up on may still be carried out, after the one that was answered.

        Raises:
            ShoalError: UNAUTHENTICATED for a token that is unknown or used by another boot, or a host given up.
        """
        context = self._context
        id = HostId(body.join_token.partition(".")[0])
        for _ in range(5):
            stored = await context.store.get(keys.host(id))
            host = load(Host, stored.item) if stored else None
            if (
                stored is None
                or host is None
                or not hmac.compare_digest(host.join_hash, hash_secret(body.join_token))
                or host.boot_id not in (None, body.boot_id)
                or host.state in _GONE
            ):
                raise ShoalError(ErrorCode.UNAUTHENTICATED, "This join token is not known, or was used.")
            token = _host_token(id, body)
            now = context.clock.now()
            state = host.state
            if state is HostState.STARTING:
                state = move(HOST, state, HostState.READY)
            new = replace(
                host,
                state=state,
                boot_id=body.boot_id,
                address=body.address,
                version=body.version,
                token_hash=hash_secret(token),
                registered_at=host.registered_at or now,
                busy_at=host.busy_at or now,
                heard_at=now,
                capacity=body.capacity,
                substrates=tuple(body.substrates),
            )
            try:
                await context.store.transact([_save(new, stored)])
            except ConditionFailed:
                continue
            self._tokens[id] = hash_secret(token)
            log.info("host.registered", host_id=id, pool=new.pool, address=new.address)
            context.fleet.heard(new, [])
            context.wake_queue.set()
            context.wake_reconciler.set()
            return Registered(
                host=id,
                pool=new.pool,
                token=token,
                lease_s=context.settings.lease_s,
                heartbeat_s=context.settings.heartbeat_s,
                keys=context.signer.public_keys,
            )
        raise ShoalError(
            ErrorCode.UNAVAILABLE, "The host's record keeps changing; try again.", retry_after_s=0.5
        )

    async def authenticate(self, host: HostId, token: str) -> None:
        """Check the token of a host's own requests.

        Raises:
            ShoalError: UNAUTHENTICATED.
        """
        hashed = hash_secret(token)
        if self._tokens.get(host) == hashed:
            return
        stored = await self._context.store.get(keys.host(host))
        known = stored.item.get("token_hash") if stored else None
        if known is None or not hmac.compare_digest(known, hashed):
            raise ShoalError(ErrorCode.UNAUTHENTICATED, "This host is not known here.")
        self._tokens[host] = hashed

    async def heartbeat(self, host: HostId, body: Heartbeat) -> HeartbeatReply:
        """Take in what a host knows; answer what it is to do.

        Raises:
            ShoalError: UNAUTHENTICATED for a host that is not known, or another boot of it.
        """
        return await self._heartbeats.take(host, body)

    async def urls(self, host: HostId, body: UrlsAsked) -> Urls:
        """Presigned URLs, only for what concerns the sessions on this host, its warm orders and its pool's queue.

        Raises:
            ShoalError: NOT_FOUND for anything else, PAYLOAD_TOO_LARGE, UNAVAILABLE.
        """
        try:
            return Urls(urls=[await self._url(host, item) for item in body.items])
        except BlobError as error:
            raise told(error) from error

    async def leave(self, host: HostId) -> None:
        """The host has ended its sandboxes and goes; repeatable."""
        await self._departure.gone(host, "The host left.", state=HostState.GONE)

    async def forget(self, host: HostId) -> None:
        """Drop the record of a host whose machine is gone; repeatable."""
        self._tokens.pop(host, None)
        self._readable.pop(host, None)
        await self._departure.forget(host)

    async def _url(self, host: HostId, item: UrlAsked) -> Url:
        match item:
            case LayerGet(digest=digest):
                await self._may_read(host, digest)
                return await self._presigned("get", names.layer(digest))
            case LayerPut(digest=digest, size_bytes=size_bytes):
                if not (await self._context.store.query(f"ON#{host}", limit=1)).items:
                    raise _not_yours()
                name = names.layer(digest)
                there = await self._context.blobs.head(name)
                url = await self._presigned(
                    "put", name, sha256=digest.removeprefix("sha256:"), size_bytes=size_bytes
                )
                return url.model_copy(update={"exists": there is not None and there.size_bytes == size_bytes})
            case JournalPut(session=session, epoch=epoch):
                if await self._context.store.get(keys.assigned(host, session, epoch)) is None:
                    raise _not_yours()
                return await self._presigned("put", names.journal(session, epoch))
            case JournalGet(session=session, epoch=epoch):
                on_host = await self._context.store.query(f"ON#{host}", prefix=f"{session}#", limit=1)
                if not on_host.items:
                    # It may be on its way to this host: the record says so only once the agent has answered.
                    found = await records.read(self._context.store, session)
                    if found is None or found.session.state not in UNPLACED:
                        raise _not_yours()
                return await self._presigned("get", names.journal(session, epoch))

            case TransferGet(transfer=transfer, session=session, use=use):
                tenant = await self._tenant_of(host, session)
                record = await self._transfers.bind(tenant, session, transfer, use)
                url = await self._presigned("get", names.transfer(record.id))
                return url.model_copy(update={"size_bytes": record.size_bytes, "sha256": record.sha256})
            case TransferPut(transfer=transfer, session=session, size_bytes=size_bytes, sha256=sha256):
                await self._tenant_of(host, session)
                record = await self._transfers.outgoing(session, transfer)
                return await self._presigned(
                    "put", names.transfer(record.id), sha256=sha256, size_bytes=size_bytes
                )

    async def _tenant_of(self, host: HostId, session: SessionId) -> TenantId:
        """Whose session it is, if it is on this host.

        Raises:
            ShoalError: NOT_FOUND.
        """
        on_host = await self._context.store.query(f"ON#{host}", prefix=f"{session}#", limit=1)
        found = await records.read(self._context.store, session) if on_host.items else None
        if found is None:
            raise _not_yours()
        return found.session.tenant

    async def _presigned(
        self,
        method: Literal["get", "put"],
        name: str,
        *,
        sha256: str | None = None,
        size_bytes: int | None = None,
    ) -> Url:
        presigned = await self._context.blobs.presign(
            method, name, expires_s=_URL_S, sha256=sha256, size_bytes=size_bytes
        )
        return Url(url=presigned.url, headers=presigned.headers)

    async def _may_read(self, host: HostId, digest: str) -> None:
        if digest in self._readable.get(host, ()):
            return
        readable = self._readable[host] = await self._layers_of(host)
        if digest not in readable:
            raise _not_yours()

    async def _layers_of(self, host: HostId) -> set[str]:
        """The layers of all that is, or may be about to come, on a host."""
        context = self._context
        digests: set[str] = set()
        ordered = await context.store.get(keys.orders(host))
        if ordered is not None:
            digests |= {level.source.digest for level in load(HostOrders, ordered.item).warm}
        on_host = await context.store.query_all(f"ON#{host}")
        sessions = await context.store.get_many([keys.session(item.item["session"]) for item in on_host])
        digests |= {
            records.disk(records.loaded(item).session).digest for item in sessions if item is not None
        }
        known = await context.fleet.host(host)
        if known is not None:
            queue = await spread.queue(context.store, known.pool)
            digests |= {load(Queued, item.item).key.digest for item in queue}
        layers: set[str] = set()
        for digest in digests:
            try:
                layers |= {layer.digest for layer in (await context.sources.stack(digest)).layers}
            except ShoalError as error:
                log.warning("manifest.unreadable", digest=digest, code=error.code.value)
        return layers


def _save(host: Host, stored: Stored) -> Put:
    return Put(key=keys.host(host.id), item=dump(host), conditions=(VersionIs(version=stored.version),))


def _not_yours() -> ShoalError:
    return ShoalError(ErrorCode.NOT_FOUND, "Nothing of that name concerns this host.")
