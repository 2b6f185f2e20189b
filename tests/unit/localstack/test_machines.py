"""What the profile's machines tell Docker of a task, and when its own processes are gone."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from scripts.localstack.daemons import DaemonError, Daemons
from scripts.localstack.machines import Machine, container_options
from scripts.localstack.places import Places

MACHINE = Machine(id="i-1", cluster="pool", number=3, arn="arn:aws:ecs:r:a:container-instance/pool/x")
TASK = {
    "taskArn": "arn:aws:ecs:r:a:task/pool/t",
    "overrides": {
        "containerOverrides": [
            {"name": "agent", "environment": [{"name": "SHOAL_AGENT_JOIN_TOKEN", "value": "secret"}]}
        ]
    },
}
CONTAINER = {
    "name": "agent",
    "image": "agent:1",
    "stopTimeout": 120,
    "linuxParameters": {"capabilities": {"add": ["DAC_READ_SEARCH"]}},
    "mountPoints": [
        {"sourceVolume": "state", "containerPath": "/var/lib/shoal", "readOnly": False},
        {"sourceVolume": "devs", "containerPath": "/dev", "readOnly": True},
    ],
    "environment": [
        {"name": "SHOAL_AGENT_LISTEN", "value": "0.0.0.0:9000"},
        {"name": "SHOAL_AGENT_CONTROL_URL", "value": "http://127.0.0.1:1"},
    ],
}
DEFINITION = {
    "volumes": [
        {"name": "state", "host": {"sourcePath": "/var/lib/shoal"}},
        {"name": "devs", "host": {"sourcePath": "/dev"}},
    ]
}


def options() -> tuple[list[str], dict[str, str]]:
    return container_options(DEFINITION, CONTAINER, TASK, MACHINE, Path("/instances"))


def test_a_container_is_what_its_task_definition_says() -> None:
    """Mounts, variables, overrides; the disk is the machine's own directory."""
    said, environment = options()
    assert "/instances/i-1/disk:/var/lib/shoal:rw" in said
    assert "/dev:/dev:ro" in said
    assert environment["SHOAL_AGENT_CONTROL_URL"] == "http://127.0.0.1:1"
    assert environment["SHOAL_AGENT_JOIN_TOKEN"] == "secret"


def test_secrets_are_no_part_of_a_command_line() -> None:
    """Variables go to Docker by name; their values only by its environment."""
    assert "secret" not in " ".join(options()[0])


def test_machines_share_one_machine_without_meeting() -> None:
    """Each has an address and host ids of its own, at the port that the task definition names."""
    other = Machine(id="i-2", cluster="pool", number=4, arn="x")
    mine = options()[1]
    theirs = container_options(DEFINITION, CONTAINER, TASK, other, Path("/instances"))[1]
    assert mine["SHOAL_AGENT_LISTEN"] == "127.77.0.3:9000"
    assert theirs["SHOAL_AGENT_LISTEN"] == "127.77.0.4:9000"
    apart = int(theirs["SHOAL_AGENT_ID_BASE"]) - int(mine["SHOAL_AGENT_ID_BASE"])
    assert apart >= 1024 * 65_536
    assert int(theirs["SHOAL_AGENT_ID_BASE"]) + apart < 1 << 32


def test_its_task_can_be_told_from_the_container() -> None:
    """By labels: that is how a host's names are found to belong together."""
    labels = [part for part in options()[0] if part.startswith("shoal.")]
    assert f"shoal.task={TASK['taskArn']}" in labels
    assert "shoal.instance=i-1" in labels


@pytest.fixture
def daemons(tmp_path: Path) -> Daemons:
    return Daemons(Places(state=tmp_path, cache=tmp_path / "cache", ministack_port=1, moto_port=2))


def test_stopping_ends_what_a_daemon_has_started(daemons: Daemons, tmp_path: Path) -> None:
    """Workers that outlive their parent go with it; a daemon that is stopped twice is stopped."""
    program = (
        "import subprocess, sys, time, pathlib;"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        "pathlib.Path('child').write_text(str(child.pid)); pathlib.Path('ready').touch(); time.sleep(600)"
    )
    ready = tmp_path / "ready"
    daemons.start("one", [sys.executable, "-c", program], dict(os.environ), ready.exists, tmp_path)
    assert daemons.running("one") is not None
    daemons.start("one", ["false"], dict(os.environ), ready.exists, tmp_path)
    child = int((tmp_path / "child").read_text())
    daemons.stop("one")
    daemons.stop("one")
    assert daemons.running("one") is None
    assert not _runs(child)


def test_a_daemon_that_cannot_serve_is_told_of_with_its_words(daemons: Daemons, tmp_path: Path) -> None:
    """What it printed comes with the error."""
    argv = [sys.executable, "-c", "import sys; sys.exit('no port is free')"]
    with pytest.raises(DaemonError, match="no port is free"):
        daemons.start("one", argv, dict(os.environ), lambda: False, tmp_path)


def _runs(pid: int) -> bool:
    """Whether it runs; one that was orphaned may stay a zombie until it is reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
