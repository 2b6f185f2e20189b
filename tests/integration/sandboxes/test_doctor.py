"""The doctor tries the real thing, names what is missing, and leaves nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from runtime_image.agent.sandboxes import doctor

SCRIPT = """
import dataclasses, json, sys
from pathlib import Path
from runtime_image.agent.sandboxes import doctor
print(json.dumps([dataclasses.asdict(check) for check in doctor(Path(sys.argv[1]))]))
"""


def test_a_machine_that_runs_these_tests_is_fit(tmp_path: Path, left_of: Any) -> None:
    """Every check passes where sandboxes do run; no mount, loop device or file is left."""
    checks = doctor(tmp_path / "home")
    assert [check for check in checks if not check.ok] == []
    assert [check for check in checks if check.remedy] == []
    left = left_of(tmp_path, "shoal-doctor-none")
    assert not left.mounts
    assert not left.loops
    assert list((tmp_path / "home").iterdir()) == []
    # Other groups come and go meanwhile: os.walk passes over those.
    groups = [name for _, names, _ in os.walk("/sys/fs/cgroup") for name in names]
    assert not [name for name in groups if name.startswith("shoal-doctor-")]


def test_a_missing_program_is_named_with_its_remedy(tmp_path: Path) -> None:
    """One check fails, the others are still looked at."""
    checks = doctor(tmp_path / "home", runc="runc-that-is-not-there")
    failed = [check for check in checks if not check.ok]
    assert [check.name for check in failed] == ["runc"]
    assert "apt-get install runc" in failed[0].remedy


def test_root_without_its_rights_is_seen_and_nothing_is_called_fine(tmp_path: Path) -> None:
    """Without CAP_SYS_ADMIN (a plain container) the trials fail; none raises, each failure has a remedy."""
    ran = subprocess.run(
        ["setpriv", "--bounding-set", "-sys_admin", sys.executable, "-c", SCRIPT, str(tmp_path / "home")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    failed = {check["name"]: check for check in json.loads(ran.stdout) if not check["ok"]}
    assert {"root", "overlay over idmapped layers"} <= set(failed)
    assert all(check["found"] and check["remedy"] for check in failed.values())
