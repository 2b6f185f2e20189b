"""What a host does at its first boot, as text: nothing here boots one."""

from __future__ import annotations

import base64
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


def test_the_home_is_the_images(scripts: list[str]) -> None:
    """The disk is mounted where the agent's image keeps its state."""
    for script in scripts:
        assert re.search(
            rf'^  mount -o noatime,prjquota "\$disk" {re.escape(str(entrypoint.STATE))}$', script, re.M
        )
