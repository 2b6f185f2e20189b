"""Images: registered once, built by a builder, never moved."""

from __future__ import annotations

from provisioner.auth import Principal
from shoal.contract import images as wire


class Images:
    """What routes call."""

    async def put(self, who: Principal, name: str, tag: str, body: wire.ImagePut) -> wire.Image:
        """Register an image and wait up to `body.wait_s` for it to be available."""
        raise NotImplementedError

    async def get(self, who: Principal, name: str, tag: str, *, wait_s: float = 0.0) -> wire.Image:
        """An image; `wait_s` waits while it is being built."""
        raise NotImplementedError

    async def list(self, who: Principal, *, cursor: str | None = None, limit: int = 100) -> wire.ImagePage:
        """Images by name and tag."""
        raise NotImplementedError

    async def delete(self, who: Principal, name: str, tag: str) -> None:
        """Take the name away; repeatable. Sessions that started from it go on."""
        raise NotImplementedError
