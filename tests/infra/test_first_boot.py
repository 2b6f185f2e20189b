"""What a host does at its first boot, as text: nothing here boots one."""

from __future__ import annotations

import base64
import configparser
import json
import re
import subprocess
from email import message_from_string

import pytest

from runtime_image.image import entrypoint
from scripts.infra_check import Resource


@pytest.fixture(params=["minimal", "production"])
def scripts(request: pytest.FixtureRequest) -> list[str]:
    """The script of each launch template."""
    resources: list[Resource] = request.getfixturevalue(request.param)
    found = []
    for resource in resources:
        if resource.type == "aws_launch_template":
            data = base64.b64decode(resource.values["user_data"]).decode("ascii")
            assert len(resource.values["user_data"]) < 16_384, "EC2 takes 16 KB"
            message = message_from_string(data)
            assert message.get_content_type() == "multipart/mixed", "AWS Batch takes nothing else"
            (part,) = message.get_payload()
            assert part.get_content_type() == "text/x-shellscript"
            found.append(part.get_payload())
    assert found
    return found


def test_it_is_a_script_that_bash_takes(scripts: list[str]) -> None:
    """No syntax error, no placeholder left, and it stops at the first failure: such a host never registers."""
    for script in scripts:
        assert script.startswith("#!/bin/bash\n")
        assert "\nset -euo pipefail\n" in script
        assert "%{" not in script
        assert "$${" not in script
        done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr


def test_what_it_writes_is_well_formed(scripts: list[str]) -> None:
    """ECS settings are `NAME=value` with JSON where ECS wants it; kernel settings are numbers."""
    for script in scripts:
        for name, value in re.findall(r"^(ECS_\w+)=(.*)$", script, re.M):
            if value.startswith(("{", "[")):
                json.loads(value)
            assert value, name
        kernel = re.search(r"90-shoal\.conf << 'EOF'\n(.*?)\nEOF", script, re.S)
        assert kernel is not None
        assert all(re.fullmatch(r"[a-z_.-]+ = \d+", line) for line in kernel[1].splitlines())


def test_docker_keeps_what_it_was_told(scripts: list[str]) -> None:
    """The daemon's settings are added to, not replaced."""
    for script in scripts:
        program = re.search(r"python3 - << 'EOF'\n(.*?)\nEOF", script, re.S)
        assert program is not None
        compile(program[1], "daemon.json", "exec")
        assert "told | {" in program[1]


def _boot(script: str) -> str:
    program = re.search(r"> /usr/local/sbin/shoal-boot << 'EOS'\n(.*?)\nEOS\n", script, re.S)
    assert program is not None
    return program[1]


def _unit(script: str) -> configparser.ConfigParser:
    text = re.search(r"> /etc/systemd/system/shoal-boot\.service << 'EOS'\n(.*?)\nEOS\n", script, re.S)
    assert text is not None
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(text[1])
    return unit


def test_the_home_is_the_images(scripts: list[str]) -> None:
    """The disk is mounted where the agent's image keeps its state, and grown to the volume it is on."""
    for script in scripts:
        state = re.escape(str(entrypoint.STATE))
        mounts = rf'\n  mount -o noatime,prjquota "\$disk" {state}\n.*\nxfs_growfs {state} '
        assert re.search(mounts, _boot(script), re.S)


def test_every_boot_has_the_disk_before_docker_and_ecs(scripts: list[str]) -> None:
    """Stopped instances of a warm pool and rebooted ones mount it too: user data runs once, a unit at every boot.

    Without it neither Docker nor the ECS agent starts, so that no agent works on the root disk.
    """
    for script in scripts:
        unit = _unit(script)
        assert unit["Service"]["ExecStart"] == "/usr/local/sbin/shoal-boot"
        assert unit["Service"]["Type"] == "oneshot"
        assert set(unit["Unit"]["Before"].split()) == {"docker.service", "ecs.service"}
        assert set(unit["Install"]["RequiredBy"].split()) == {"docker.service", "ecs.service"}
        enabled, started, daemon = (
            script.index(line)
            for line in (
                "\nsystemctl enable shoal-boot.service\n",
                "\nsystemctl start shoal-boot.service\n",
                "systemctl restart docker\n",
            )
        )
        assert enabled < started < daemon
        for once in ("mount -o", "mkfs.xfs", "modprobe", "swapoff"):
            assert once not in script.replace(_boot(script), ""), "left to the unit"
        done = subprocess.run(
            ["bash", "-n"], input=_boot(script), text=True, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr


def test_agents_get_two_minutes_to_end(scripts: list[str]) -> None:
    """The ECS agent is told on every host, those of AWS Batch as well, where no definition can say it."""
    for script in scripts:
        told = re.search(r">> /etc/ecs/ecs\.config << 'EOF'\n(.*?)\nEOF\n", script, re.S)
        assert told is not None
        assert "ECS_CONTAINER_STOP_TIMEOUT=120s" in told[1].splitlines()
