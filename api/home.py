"""The home of a server on one machine: who runs on it, and the key that opens it.

<home>/                  0700
    lock                 held (flock) while a server runs
    server.json          its pid, the pid's start time, its URL
    credentials.json     0600: URL and admin key; what SDK and CLI read is a copy of it
    state.db             the store
    blobs/  hosts/  layers/  guest/
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

DEFAULT_HOME = Path("~/.local/share/shoal")
#: Where SDK and CLI look for the URL and the key, unless `SHOAL_CREDENTIALS` names another file.
CREDENTIALS_VARIABLE = "SHOAL_CREDENTIALS"
DEFAULT_CREDENTIALS = Path("~/.config/shoal/credentials.json")


class HomeBusy(Exception):
    """Another server runs on this home. `server` tells which, where it has said so."""

    def __init__(self, home: Path, server: RunningServer | None) -> None:
        who = f" (pid {server.pid}, {server.url})" if server is not None else ""
        super().__init__(f"a server runs on {home} already{who}; stop it, or choose another --home")
        self.server = server


@dataclass(frozen=True, kw_only=True)
class RunningServer:
    """What a server says of itself in its home. `started` is its start time in clock ticks since boot: a pid alone
    may have been given to another process since."""

    pid: int
    started: int
    url: str

    def alive(self) -> bool:
        """Whether that very process still runs."""
        return start_ticks(self.pid) == self.started


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """Where a server is and the key that opens it."""

    url: str
    api_key: str


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when there is none (or only its zombie)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    if fields[0] in ("Z", "X"):
        return None
    return int(fields[19])


def credentials_path() -> Path:
    """The file that SDK and CLI read."""
    named = os.environ.get(CREDENTIALS_VARIABLE)
    return Path(named) if named else DEFAULT_CREDENTIALS.expanduser()


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner may read: aside, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(text)
    aside.replace(path)


class Home:
    """A server's directory."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().resolve()

    def make(self) -> None:
        """Make it, for its owner alone."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path.chmod(0o700)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the home. The lock goes with the process, however that ends.

        Raises:
            HomeBusy: Another process holds it.
        """
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise HomeBusy(self.path, self.server()) from None
            yield
        finally:
            os.close(descriptor)

    def is_locked(self) -> bool:
        """Whether a server holds it now."""
        try:
            descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        else:
            return False
        finally:
            os.close(descriptor)

    def server(self) -> RunningServer | None:
        """The last server that ran here; None when none said so. It may be gone: see `RunningServer.alive`."""
        try:
            return RunningServer(**json.loads((self.path / "server.json").read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def write_server(self, url: str) -> RunningServer:
        """Say that this process serves here."""
        started = start_ticks(os.getpid())
        assert started is not None, "this process runs"
        server = RunningServer(pid=os.getpid(), started=started, url=url)
        write_private(self.path / "server.json", json.dumps(asdict(server)) + "\n")
        return server

    def credentials(self) -> Credentials | None:
        """The key that was made here; None before the first start."""
        try:
            return Credentials(**json.loads((self.path / "credentials.json").read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def write_credentials(self, credentials: Credentials, *, copy: Path) -> None:
        """Keep the key here, and where SDK and CLI read it."""
        text = json.dumps(asdict(credentials)) + "\n"
        write_private(self.path / "credentials.json", text)
        write_private(copy, text)
