"""The container's health check: whether the agent of this container answers. Exit code 0 or 1."""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request
from pathlib import Path

from runtime_image.image.entrypoint import HOME_LINK

_TIMEOUT_S = 4.0


def agent_url(home: Path, listen: str) -> str:
    """Where this container's agent listens, from inside. Raises OSError before it does."""
    address, _, _ = listen.rpartition(":")
    port = int((home / "port").read_text())
    return f"http://{'127.0.0.1' if address in ('0.0.0.0', '[::]', '') else address}:{port}/healthz"


def main() -> int:
    """0: it answers."""
    try:
        url = agent_url(HOME_LINK, os.environ.get("SHOAL_AGENT_LISTEN", ""))
        # No proxy of the environment: it is this very container.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url, timeout=_TIMEOUT_S) as answer:
            return 0 if answer.status == 200 else 1
    except (OSError, ValueError, urllib.error.URLError) as error:
        print(f"health: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
