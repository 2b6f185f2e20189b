"""Where the service is and as whom to speak to it: arguments, then the environment, then the credentials file."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from shoal.client.errors import ConfigError

#: In-flight requests of one client; over it, requests wait for their turn without a time-out.
DEFAULT_MAX_IN_FLIGHT = 2048


@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """What a client needs to speak. Pickled with handles, key included: treat pickles of handles as secrets.

    Attributes:
        url: Base URL of the service, without a slash at its end.
        api_key: The bearer key.
        max_in_flight: Requests at once, long polls counted. Others wait for their turn.
        direct: Send actions and files straight to the session's host when the service offers the way.
    """

    url: str
    api_key: str = field(repr=False)
    max_in_flight: int = DEFAULT_MAX_IN_FLIGHT
    direct: bool = False

    @property
    def is_loopback(self) -> bool:
        """Whether the service is on this machine, so that no proxy of the environment is asked."""
        return urlsplit(self.url).hostname in {"localhost", "127.0.0.1", "::1"}


def credentials_path() -> Path:
    """The credentials file: `$SHOAL_CREDENTIALS`, else `~/.config/shoal/credentials.json`."""
    named = os.environ.get("SHOAL_CREDENTIALS")
    return Path(named) if named else Path.home() / ".config" / "shoal" / "credentials.json"


def _from_file(path: Path) -> dict[str, str]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"the credentials file {path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f'the credentials file {path} must hold {{"url": ..., "api_key": ...}}')
    return {key: value for key, value in content.items() if isinstance(value, str)}


def resolve(
    url: str | None = None,
    api_key: str | None = None,
    *,
    max_in_flight: int | None = None,
    direct: bool = False,
) -> ClientConfig:
    """The configuration from arguments, `SHOAL_URL` and `SHOAL_API_KEY`, and the credentials file.

    The file's key is used only with the file's own URL: a key is never sent to another service than the one it
    is for.

    Raises:
        ConfigError: No URL or no key was found, or the file cannot be read.
    """
    url = url or os.environ.get("SHOAL_URL") or None
    api_key = api_key or os.environ.get("SHOAL_API_KEY") or None
    if url is None or api_key is None:
        path = credentials_path()
        stored = _from_file(path)
        stored_url = stored.get("url", "").rstrip("/")
        if url is None:
            url = stored_url or None
        if api_key is None and url is not None and url.rstrip("/") == stored_url:
            api_key = stored.get("api_key")
        if url is None:
            raise ConfigError(
                f"no service is known: set SHOAL_URL and SHOAL_API_KEY, or run `shoal up`, which writes {path}"
            )
        if api_key is None:
            raise ConfigError(f"no API key for {url}: set SHOAL_API_KEY, or put it in {path}")
    if urlsplit(url).scheme not in {"http", "https"}:
        raise ConfigError(f"SHOAL_URL must start with http:// or https://, not {url!r}")
    if max_in_flight is None:
        max_in_flight = _affordable_in_flight()
    if max_in_flight < 1:
        raise ConfigError("max_in_flight must be at least 1")
    return ClientConfig(url=url.rstrip("/"), api_key=api_key, max_in_flight=max_in_flight, direct=direct)


def _affordable_in_flight() -> int:
    """The default bound, or three quarters of the descriptors that this process may open when that is less."""
    try:
        import resource
    except ImportError:  # not a POSIX system
        return DEFAULT_MAX_IN_FLIGHT
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return DEFAULT_MAX_IN_FLIGHT
    return max(16, min(DEFAULT_MAX_IN_FLIGHT, soft * 3 // 4))
