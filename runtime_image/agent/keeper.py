"""What outlives an agent: each sandbox's socket, and what it was started as, held by the holder.

The description is in a memory file, not on the disk: it has the session's environment values in it.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import datetime

import structlog
from pydantic import BaseModel, Field, ValidationError

from runtime_image.agent.limits import Told
from runtime_image.agent.ports import DescriptorStore
from runtime_image.agent.starting import Started
from shoal.contract.host import SandboxSource, SandboxStart, WarmKey
from shoal.contract.images import Layer

_log = structlog.get_logger()
_ABOUT = ".about"


class About(BaseModel):
    """What a sandbox is: a session's (`spec`), or a warm one (`key`, `source`). `metered_to`, `metered_cpu_usec`: where
    its next usage record begins. `told`: which limits hit were told."""

    layers: list[Layer]
    spec: SandboxStart | None = None
    warm: bool = False
    acknowledged: bool = False
    running: bool = False
    metered_to: datetime | None = None
    metered_cpu_usec: int = 0
    told: Told = Field(default_factory=Told)
    key: WarmKey | None = None
    source: SandboxSource | None = None


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A sandbox of an earlier agent."""

    sandbox_id: str
    sock: socket.socket
    about: About


class Keeper:
    """Puts sandboxes into the holder's hands and takes them out again. A holder that fails is logged: the sandboxes
    then live on, and are cleaned up, not adopted, after a crash."""

    def __init__(self, store: DescriptorStore) -> None:
        self._store = store
        self._files: dict[str, int] = {}

    def keep_session(self, sandbox_id: str, sock: socket.socket | None, about: About) -> None:
        """Keep a session's sandbox; repeated, it replaces the description."""
        self._keep(sandbox_id, sock, about)

    def keep_warm(self, sandbox_id: str, started: Started, key: WarmKey, source: SandboxSource) -> None:
        """Keep a warm sandbox."""
        about = About(layers=list(started.stack.layers), key=key, source=source)
        self._keep(sandbox_id, started.sandbox.sock, about)

    def _keep(self, sandbox_id: str, sock: socket.socket | None, about: About) -> None:
        data = about.model_dump_json().encode()
        try:
            fd = self._files.get(sandbox_id)
            if fd is None:
                fd = os.memfd_create(sandbox_id, os.MFD_CLOEXEC)
                self._files[sandbox_id] = fd
                os.pwrite(fd, data, 0)
                self._store.put(sandbox_id + _ABOUT, fd)
                if sock is not None:
                    self._store.put(sandbox_id, sock.fileno())
            else:
                # Padded rather than cut: whenever we die, what is there can be read.
                os.pwrite(fd, data.ljust(os.fstat(fd).st_size), 0)
        except OSError as error:
            _log.error("holder.failed", sandbox_id=sandbox_id, error=str(error))

    def drop(self, sandbox_id: str) -> None:
        """Keep it no longer; harmless when repeated."""
        fd = self._files.pop(sandbox_id, None)
        if fd is not None:
            os.close(fd)
        try:
            self._store.drop(sandbox_id)
            self._store.drop(sandbox_id + _ABOUT)
        except OSError as error:
            _log.error("holder.failed", sandbox_id=sandbox_id, error=str(error))

    def load(self) -> list[Kept]:
        """What an earlier agent left. What cannot be read is dropped."""
        try:
            found = self._store.get_all()
        except OSError as error:
            _log.error("holder.failed", error=str(error))
            return []
        kept: list[Kept] = []
        for name, fd in found.items():
            if name.endswith(_ABOUT):
                continue
            about = _read(found.get(name + _ABOUT))
            if about is None:
                os.close(fd)
                self.drop(name)
                continue
            self._files[name] = found[name + _ABOUT]
            kept.append(Kept(sandbox_id=name, sock=socket.socket(fileno=fd), about=about))
        known = {one.sandbox_id for one in kept}
        for name, fd in found.items():
            if name.endswith(_ABOUT) and name.removesuffix(_ABOUT) not in known:
                os.close(fd)
                self.drop(name.removesuffix(_ABOUT))
        return kept


def _read(fd: int | None) -> About | None:
    if fd is None:
        return None
    size = os.fstat(fd).st_size
    try:
        return About.model_validate_json(os.pread(fd, size, 0))
    except ValidationError:
        return None
