"""What a host does at its first boot, as text: nothing here boots one."""

from __future__ import annotations

import base64
import configparser
import json
import os
import re
import subprocess
from email import message_from_string
from pathlib import Path

import pytest

from runtime_image.image import entrypoint
from scripts.infra_check import Resource
from tests.infra.conftest import States


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


def test_a_baked_image_brings_the_disk(states: States) -> None:
    """Hosts of it get no blank volume over the one with the layers, and do not look for disks of their own."""
    templates = {
        resource.address: resource.values
        for resource in states("production")["baked"]
        if resource.type == "aws_launch_template" and resource.values["image_id"]
    }
    assert {"module.pool", "module.steady"} == {".".join(name.split(".")[:2]) for name in templates}
    for values in templates.values():
        assert values["image_id"] == "ami-0123456789abcdef0"
        assert [each["device_name"] for each in values["block_device_mappings"]] == ["/dev/xvda"]
        assert "Instance Storage" not in base64.b64decode(values["user_data"]).decode("ascii")


#: A command that writes down how it was called, and answers from a file of its name where there is one.
STUB = """#!/bin/bash
name=${0##*/}
printf '%s' "$name" >> "$STUBS/calls"
printf ' %s' "$@" >> "$STUBS/calls"
echo >> "$STUBS/calls"
answer="$STUBS/$name.answer"
if [[ $name == lsblk && $* == *NAME,TYPE* ]]; then answer="$STUBS/raid.answer"; fi
if [[ $name == mdadm && $* == *--assemble* ]]; then exit 1; fi
if [[ -e $answer ]]; then cat "$answer"; elif [[ $name == mountpoint || $name == blkid ]]; then exit 1; fi
"""
STUBBED = ("blkid", "lsblk", "mdadm", "mkdir", "mkfs.xfs", "modprobe", "mount", "mountpoint", "readlink", "swapoff",
           "udevadm", "xfs_growfs")  # fmt: skip
STORES = "/dev/nvme0n1 Amazon Elastic Block Store\n/dev/nvme1n1 Amazon EC2 NVMe Instance Storage\n"


@pytest.mark.parametrize(
    ("answers", "changes"),
    [
        pytest.param(
            {"readlink": "/dev/nvme1n1\n"},
            [
                "mkfs.xfs -q -m reflink=1 /dev/nvme1n1",
                "mount -o noatime,prjquota /dev/nvme1n1 /var/lib/shoal",
            ],
            id="a blank volume",
        ),
        pytest.param(
            {"readlink": "/dev/nvme1n1\n", "blkid": "xfs\n"},
            ["mount -o noatime,prjquota /dev/nvme1n1 /var/lib/shoal"],
            id="a volume with layers, or a reboot",
        ),
        pytest.param(
            {"lsblk": STORES},
            [
                "mkfs.xfs -q -m reflink=1 /dev/nvme1n1",
                "mount -o noatime,prjquota /dev/nvme1n1 /var/lib/shoal",
            ],
            id="one disk of the instance's own, blank after a stop",
        ),
        pytest.param(
            {"lsblk": STORES + "/dev/nvme2n1 Amazon EC2 NVMe Instance Storage\n"},
            [
                "mdadm --assemble /dev/md0 /dev/nvme1n1 /dev/nvme2n1",
                "mdadm --create /dev/md0 --run --level 0 --raid-devices 2 /dev/nvme1n1 /dev/nvme2n1",
                "mkfs.xfs -q -m reflink=1 /dev/md0",
                "mount -o noatime,prjquota /dev/md0 /var/lib/shoal",
            ],
            id="two of them",
        ),
        pytest.param(
            {
                "lsblk": STORES + "/dev/nvme2n1 Amazon EC2 NVMe Instance Storage\n",
                "raid": "/dev/nvme1n1 disk\n/dev/md127 raid0\n/dev/nvme2n1 disk\n",
                "blkid": "xfs\n",
            },
            ["mount -o noatime,prjquota /dev/md127 /var/lib/shoal"],
            id="two of them, after a reboot under another name",
        ),
        pytest.param({"mountpoint": ""}, [], id="mounted already"),
    ],
)
def test_a_boot_formats_what_is_blank_and_mounts_what_there_is(
    minimal: list[Resource], tmp_path: Path, answers: dict[str, str], changes: list[str]
) -> None:
    """The program of the unit, with every command that would touch the machine replaced."""
    (template,) = [r for r in minimal if r.type == "aws_launch_template"]
    message = message_from_string(base64.b64decode(template.values["user_data"]).decode("ascii"))
    (part,) = message.get_payload()
    for name in STUBBED:
        (tmp_path / name).write_text(STUB)
        (tmp_path / name).chmod(0o755)
    for name, answer in answers.items():
        (tmp_path / f"{name}.answer").write_text(answer)
    done = subprocess.run(
        ["bash"],
        input=_boot(part.get_payload()),
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "STUBS": str(tmp_path)},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[:3] == ["modprobe --all loop overlay", "swapoff --all", "udevadm settle --timeout=60"]
    assert [call for call in calls if call.split()[0] in ("mdadm", "mkfs.xfs", "mount")] == changes
    assert calls[-1] == "xfs_growfs /var/lib/shoal"
