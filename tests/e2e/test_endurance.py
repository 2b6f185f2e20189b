"""What must hold over many rounds, large files and killed clients."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from shoal.client import AsyncShoal
from tests.e2e.conftest import ROOT, Server

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(900)]

_GIB = 1 << 30


async def test_a_hundred_snapshots_and_restores_lose_nothing(async_shoal: AsyncShoal) -> None:
    """Write, change, delete; snapshot; start anew from it: the tree is what was written, a hundred times over."""
    chance = random.Random(17)
    wanted: dict[str, str] = {}
    box = await async_shoal.session("minimal:1", resources={"disk_mib": 256, "memory_mib": 64})
    for cycle in range(100):
        name = f"/workspace/d{cycle % 7}/f{cycle % 23}"
        text = f"{cycle} {chance.random()}\n" * chance.randrange(1, 200)
        await box.write_file(name, text)
        wanted[name] = text
        if cycle % 3 == 0 and len(wanted) > 1:
            gone = chance.choice(sorted(wanted))
            await box.exec(["/bin/rm", gone])
            del wanted[gone]
        snapshot = await box.snapshot()
        await box.delete()
        box = await async_shoal.session(
            snapshot=snapshot, resources={"disk_mib": 256, "memory_mib": 64}, steps=f"c{cycle}"
        )
        listed = await box.exec("find /workspace -type f | sort | xargs md5sum")
        found = {line.split("  ", 1)[1]: line.split()[0] for line in listed.stdout.splitlines()}
        assert found == {path: hashlib.md5(text.encode()).hexdigest() for path, text in wanted.items()}, cycle
    await box.delete()


def _chunks(size: int) -> Iterator[bytes]:
    block = random.Random(5).randbytes(1 << 20)
    for number in range(size >> 20):
        yield number.to_bytes(8, "big") + block[8:]


def _resident_kib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    raise AssertionError("no such process")


def test_a_gibibyte_goes_in_and_out_in_constant_memory(server: Server) -> None:
    """The same bytes come back, and the server's peak memory does not follow the file's size."""
    assert server.process is not None
    with server.client() as client:
        asked = {"image": "minimal:1", "resources": {"disk_mib": 4096, "memory_mib": 128}, "wait_s": 25}
        session = client.post("/v1/sessions", json=asked).json()["id"]
        path = f"/v1/sessions/{session}/files"
        before = _resident_kib(server.process.pid)
        answer = client.put(path, params={"path": "/workspace/big"}, content=_chunks(_GIB), timeout=300)
        assert answer.status_code in (200, 201), answer.text
        digest = hashlib.sha256()
        for chunk in _chunks(_GIB):
            digest.update(chunk)
        back, size = hashlib.sha256(), 0
        with client.stream("GET", path, params={"path": "/workspace/big"}, timeout=300) as response:
            assert response.status_code == 200
            for chunk in response.iter_bytes():
                back.update(chunk)
                size += len(chunk)
        assert size == _GIB
        assert back.hexdigest() == digest.hexdigest()
        assert _resident_kib(server.process.pid) - before < 128 * 1024
        client.delete(f"/v1/sessions/{session}")


TRAINER = """
    import sys
    from shoal import Shoal
    with Shoal(sys.argv[1], sys.argv[2]) as shoal:
        with shoal.session("minimal:1", name="killed-trainer", run="killed", keep=True) as box:
            for number in range(20):
                box.exec("echo x >> /count; sleep 0.05")
                print(number, flush=True)
            print("lines", box.exec("wc -l < /count").stdout, flush=True)
"""


def test_a_killed_trainer_runs_again_and_fast_forwards(server: Server, tmp_path: Path) -> None:
    """SIGKILL in the middle, three times: the script run again goes on, and every step ran once."""
    script = tmp_path / "trainer.py"
    script.write_text(textwrap.dedent(TRAINER))
    command = [sys.executable, str(script), server.url, server.key]
    for kill_after in (3, 9, 15):
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip() == str(kill_after):
                os.kill(process.pid, signal.SIGKILL)
                break
        process.stdout.close()
        assert process.wait() == -signal.SIGKILL
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.split()[-2:] == ["lines", "20"]
    with server.client() as client:
        (found,) = client.get("/v1/sessions", params={"run": "killed"}).json()["sessions"]
        client.delete(f"/v1/sessions/{found['id']}")


def test_a_deleted_session_is_not_listed_again(server: Server) -> None:
    """From the moment a delete is answered no list shows the session, however its teardown goes on."""
    with server.client() as client:
        for _ in range(10):
            asked = {"image": "minimal:1", "run": "lists", "wait_s": 25}
            session = client.post("/v1/sessions", json=asked).json()["id"]
            assert _listed(client, session)
            client.delete(f"/v1/sessions/{session}")
            for _ in range(20):
                assert not _listed(client, session)
                time.sleep(0.01)


def _listed(client: httpx.Client, session: str) -> bool:
    page = client.get("/v1/sessions", params={"run": "lists"}).json()
    return any(item["id"] == session for item in page["sessions"])
