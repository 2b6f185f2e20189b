"""The holder keeps an agent and its descriptors; it is real here, its agents are small scripts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtime_image.agent.holder import HolderClient, HolderError

Start = Callable[[str], "subprocess.Popen[bytes]"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Longer than a socket address may be."""
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    return deep / "holder.sock"


@pytest.fixture
def start(path: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts a holder whose agent is the given Python script; its working directory is `tmp_path`."""
    running: list[subprocess.Popen[bytes]] = []

    def begin(script: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "runtime_image.agent.holder", "--socket", str(path), "--"]
        holder = subprocess.Popen(
            [*command, sys.executable, "-c", script],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        )
        running.append(holder)
        return holder

    yield begin
    for holder in running:
        if holder.poll() is None:
            holder.terminate()
        holder.wait(10)


def eventually(check: Callable[[], object], seconds: float = 10) -> None:
    """Poll until true; the states waited for come from other processes."""
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, "never came true"
        time.sleep(0.005)


SLEEPING = "import signal, time; open('pids', 'a').write(f'{__import__(\"os\").getpid()}\\n'); time.sleep(60)"


def pids(tmp_path: Path) -> list[int]:
    """Of the agents started so far."""
    file = tmp_path / "pids"
    return [int(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_keeps_descriptors_while_the_agent_dies_and_starts_another(
    start: Start, path: Path, tmp_path: Path
) -> None:
    """A killed agent is replaced, and what it left with the holder is still open for the next."""
    start(SLEEPING)
    eventually(path.exists)
    eventually(lambda: len(pids(tmp_path)) == 1)
    client = HolderClient(path)
    read_end, write_end = os.pipe()
    client.put("sandbox", write_end)
    os.close(write_end)
    os.kill(pids(tmp_path)[0], signal.SIGKILL)
    eventually(lambda: len(pids(tmp_path)) == 2)
    with HolderClient(path) as after:
        kept = after.get_all()
    assert list(kept) == ["sandbox"]
    os.write(kept["sandbox"], b"alive")
    assert os.read(read_end, 10) == b"alive"
    os.close(kept["sandbox"])
    client.drop("sandbox")
    assert os.read(read_end, 10) == b"", "dropped, yet still open somewhere"
    os.close(read_end)
    client.close()


def test_gives_back_many_descriptors_by_name(start: Start, path: Path) -> None:
    """More than one message carries come back, each under its name; a second put replaces the first."""
    start(SLEEPING)
    eventually(path.exists)
    client = HolderClient(path)
    names = {f"{number:03}" + "n" * 190: number for number in range(100)}
    for name, number in names.items():
        fd = os.memfd_create("x")
        os.write(fd, str(number).encode())
        client.put(name, fd)
        client.put(name, fd)
        os.close(fd)
    kept = client.get_all()
    assert {name: int(os.pread(fd, 10, 0)) for name, fd in kept.items()} == names
    for fd in kept.values():
        os.close(fd)
    client.close()


def test_passes_sigterm_on_and_ends_with_the_agent(start: Start, path: Path, tmp_path: Path) -> None:
    """SIGTERM reaches the agent, whose own ending decides; the holder does not start it again."""
    script = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (open('told', 'w'), sys.exit(7)))\n"
    ) + SLEEPING
    holder = start(script)
    eventually(lambda: pids(tmp_path))
    holder.terminate()
    assert holder.wait(10) == 7
    assert (tmp_path / "told").exists()
    assert len(pids(tmp_path)) == 1
    assert not path.exists()


def test_an_agent_that_ends_well_is_not_started_again(start: Start, tmp_path: Path) -> None:
    """Exit code 0 says that the agent is done."""
    holder = start("open('pids', 'a').write('1\\n')")
    assert holder.wait(10) == 0
    assert pids(tmp_path) == [1]


def test_shutdown_lets_the_agents_death_be_the_end(start: Start, path: Path, tmp_path: Path) -> None:
    """After `shutdown` even a crash is not answered by a new agent."""
    holder = start(SLEEPING)
    eventually(lambda: pids(tmp_path))
    client = HolderClient(path)
    client.shutdown()
    client.close()
    os.kill(pids(tmp_path)[0], signal.SIGKILL)
    assert holder.wait(10) == 128 + signal.SIGKILL
    assert len(pids(tmp_path)) == 1


def test_a_client_that_talks_nonsense_harms_nobody(start: Start, path: Path) -> None:
    """Wrong messages are refused and the holder goes on."""
    start(SLEEPING)
    eventually(path.exists)
    client = HolderClient(path)
    with pytest.raises(HolderError):
        client._exchange(b"X?", [])
    with pytest.raises(HolderError):
        client.put("", 0)
    with pytest.raises(HolderError):
        client._exchange(b"Pname", [0, 0])
    assert client.get_all() == {}
    client.close()


def test_without_a_holder_the_error_says_so(path: Path) -> None:
    """No holder is a HolderError, which is an OSError."""
    with pytest.raises(HolderError, match="holder at"):
        HolderClient(path).get_all()
