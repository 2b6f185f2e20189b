"""A home is one server's: locked, private, and honest about who runs on it."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from api.down import run_down
from api.home import Credentials, Home, HomeBusy, RunningServer, credentials_path, start_ticks
from api.options import DownOptions, UpOptions, parse
from api.serving import bind


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home(tmp_path / "home")
    made.make()
    return made


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_two_servers_on_one_home_refuse_and_say_who_holds_it(home: Home) -> None:
    """The second is told the pid and the URL of the first; afterwards the home is free."""
    with home.locked():
        home.write_server("http://127.0.0.1:1")
        with pytest.raises(HomeBusy, match=f"pid {os.getpid()}, http://127.0.0.1:1"), home.locked():
            pass
        assert home.is_locked()
    assert not home.is_locked()
    with home.locked():
        pass


def test_what_a_home_keeps_is_its_owners_alone(home: Home, tmp_path: Path) -> None:
    """0700 and 0600, also the copy for SDK and CLI, also over a file that was open to all."""
    copy = tmp_path / "config" / "credentials.json"
    copy.parent.mkdir()
    copy.touch(mode=0o666)
    home.write_credentials(Credentials(url="http://x", api_key="secret"), copy=copy)
    assert mode_of(home.path) == 0o700
    for path in (home.path / "credentials.json", copy):
        assert mode_of(path) == 0o600
        assert json.loads(path.read_text()) == {"url": "http://x", "api_key": "secret"}
    assert home.credentials() == Credentials(url="http://x", api_key="secret")


def test_a_damaged_or_missing_file_is_none(home: Home) -> None:
    """A start after a crash in the middle of the first one makes what is missing."""
    assert home.server() is None
    assert home.credentials() is None
    (home.path / "credentials.json").write_text('{"url": ')
    assert home.credentials() is None


def test_a_pid_that_was_given_to_another_process_is_not_taken_for_the_server() -> None:
    """Pid and start time name a process; the pid alone does not."""
    mine = start_ticks(os.getpid())
    assert mine is not None
    assert RunningServer(pid=os.getpid(), started=mine, url="").alive()
    assert not RunningServer(pid=os.getpid(), started=mine - 1, url="").alive()


def test_down_stops_the_server_of_the_home_and_waits_for_it(home: Home) -> None:
    """It returns when the process is gone and the home is free; repeating it is no failure."""
    script = (
        "import sys, signal, pathlib\n"
        "from api.home import Home\n"
        "home = Home(pathlib.Path(sys.argv[1]))\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        "with home.locked():\n"
        "    home.write_server('http://127.0.0.1:1')\n"
        "    print('ready', flush=True)\n"
        "    while True:\n"
        "        signal.pause()\n"
    )
    server = subprocess.Popen(
        [sys.executable, "-c", script, str(home.path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        assert run_down(DownOptions(home=home.path, timeout_s=20)) == 0
        assert server.wait(5) == 0
        assert not home.is_locked()
        assert run_down(DownOptions(home=home.path, timeout_s=1)) == 0
    finally:
        server.kill()
        server.wait()
        if server.stdout is not None:
            server.stdout.close()


def test_down_says_when_the_server_does_not_stop(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    """One that hangs is a failure with its pid, not a success."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with home.locked():
            home.write_server("http://127.0.0.1:1")
            assert run_down(DownOptions(home=home.path, timeout_s=0.1)) == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    assert f"pid {os.getpid()} has not stopped" in capsys.readouterr().err


def test_a_restart_with_any_port_takes_the_last_one_where_it_can() -> None:
    """Hosts that live on call the old address; when it is taken another one is better than none."""
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
    with bind("127.0.0.1", 0, preferred=port) as again:
        assert again.getsockname()[1] == port
        with bind("127.0.0.1", 0, preferred=port) as other:
            assert other.getsockname()[1] != port
        with pytest.raises(OSError, match="in use"):
            bind("127.0.0.1", port)


def test_options_have_defaults_and_know_where_the_sdk_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No argument at all runs a server; `down` is a command of its own."""
    monkeypatch.setenv("SHOAL_CREDENTIALS", "/x/y.json")
    options = parse([])
    assert isinstance(options, UpOptions)
    assert (options.host, options.port, options.credentials) == ("127.0.0.1", 8700, Path("/x/y.json"))
    assert isinstance(parse(["--port", "0"]), UpOptions)
    assert isinstance(parse(["down", "--home", "/tmp/h"]), DownOptions)
    monkeypatch.delenv("SHOAL_CREDENTIALS")
    assert credentials_path() == Path("~/.config/shoal/credentials.json").expanduser()


@pytest.mark.parametrize("arguments", [["--port", "70000"], ["--max-hosts", "0"], ["sideways"]])
def test_wrong_options_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """With exit code 2 and a message."""
    with pytest.raises(SystemExit) as refused:
        parse(arguments)
    assert refused.value.code == 2
    assert capsys.readouterr().err


def test_listeners_are_not_inherited() -> None:
    """Agents that the server starts do not hold its port after it has gone."""
    with bind("127.0.0.1", 0) as listener:
        assert isinstance(listener, socket.socket)
        assert not listener.get_inheritable()
