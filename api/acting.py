"""Typed calls to agents for the routes that need them: `execute` and `actions:wait`."""

from __future__ import annotations

from urllib.parse import quote

from pydantic import ValidationError

from api.relay import Archive
from api.routing import Ended, Route
from api.upstream import BROKEN, Failure, Unreachable, Upstream, broken_off, error_of, harmless, is_stale
from provisioner.auth import Principal
from shoal.contract.actions import ActionRecord, ActionRequest
from shoal.contract.base import SessionId
from shoal.contract.errors import ErrorCode, ShoalError

#: An offset past any output: the record alone is wanted.
_NO_OUTPUT = 1 << 53


class Acting:
    """Acts in sessions on behalf of a caller."""

    def __init__(self, *, upstream: Upstream, archive: Archive) -> None:
        self._upstream = upstream
        self._archive = archive

    async def act(self, who: Principal, session: SessionId, request: ActionRequest) -> ActionRecord:
        """Run one action. It needs its `id`: a lost answer is asked for again under it.

        Raises:
            ShoalError: Whatever the agent refuses with, or SESSION_ENDED, SESSION_NOT_READY, HOST_UNREACHABLE.
        """
        content = request.model_dump_json(exclude_none=True).encode()
        target = f"/v1/sessions/{quote(session, safe='')}/actions"
        try:
            return await self._record(who, session, "POST", target, content, request.wait_s)
        except Ended as ended:
            raise ended.refusal() from None

    async def record(
        self, who: Principal, session: SessionId, action: str, *, wait_s: float = 0.0, output: bool = True
    ) -> ActionRecord:
        """The record of an action, from its host or from the journal.

        Args:
            wait_s: How long to wait for its end.
            output: False leaves out what a running action printed.

        Raises:
            ShoalError: NOT_FOUND when it was never made.
        """
        query = f"wait_s={wait_s:.3f}"
        if not output:
            query += f"&stdout_offset={_NO_OUTPUT}&stderr_offset={_NO_OUTPUT}"
        target = f"/v1/sessions/{quote(session, safe='')}/actions/{quote(action, safe='')}?{query}"
        try:
            return await self._record(who, session, "GET", target, None, wait_s)
        except Ended as ended:
            return await self._archive.action(who, ended.location, action)

    async def _record(
        self,
        who: Principal,
        session: SessionId,
        method: str,
        target: str,
        content: bytes | None,
        wait_s: float,
    ) -> ActionRecord:
        found: list[ActionRecord] = []

        async def attempt(route: Route) -> Failure | None:
            headers = {"content-type": "application/json"} if content is not None else {}
            try:
                response = await self._upstream.send(route, method, target, headers=headers, data=content)
            except Unreachable as unreachable:
                return unreachable
            async with response:
                if response.status >= 400:
                    error = await error_of(response)
                    if is_stale(error):
                        return error
                    raise error
                try:
                    found.append(ActionRecord.model_validate_json(await response.read()))
                except ValidationError as error:
                    raise ShoalError(
                        ErrorCode.INTERNAL, "the host answered with something that is no record"
                    ) from error
                except BROKEN as error:
                    raise broken_off(error) from error
            return None

        await self._upstream.follow(
            who,
            session,
            attempt,
            wait_s=lambda: wait_s,
            may_repeat=lambda failure: harmless(failure, repeatable=True),
        )
        return found[0]
