"""Whole plans of known scenes, kept as text: whoever changes what is decided sees it in the diff.

`SHOAL_WRITE_GOLDEN=1 pytest tests/unit/provisioner/test_planner_golden.py` writes them anew.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from datetime import datetime, timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from provisioner.placement import Room
from provisioner.plan import InstanceFacts, Plan, Policy, Recent, View
from provisioner.planner import plan
from shoal.contract.base import HostId
from shoal.contract.states import HostState
from tests.unit.provisioner.test_planner import NOW, ONE, host, key, policy, source, waiting, wanted

GOLDEN = Path(__file__).parent / "golden"
FULL = Room(cpu_millis=8000, memory_mib=8192, disk_mib=32_768, sandboxes=8)
LONG_AGO = NOW - timedelta(hours=1)


def recent(busiest: int) -> Recent:
    return Recent(pool="default", key=key(), source=source(), room=ONE, last_at=NOW, busiest=busiest)


def view(**changes: Any) -> View:
    about: dict[str, Any] = {
        "hosts": (), "orphans": (), "waiting": (), "wanted": (), "recent": (), "pools": {},
    }  # fmt: skip
    return View(**(about | changes))


SCENES: dict[str, tuple[View, Policy]] = {
    "a burst at zero hosts": (view(waiting=tuple(waiting(n) for n in range(20))), policy()),
    "a burst beyond the limit": (view(waiting=tuple(waiting(n) for n in range(200))), policy()),
    "a burst in steps": (view(waiting=tuple(waiting(n) for n in range(30))), policy(max_hosts=9, max_step=2)),
    "a pool of unknown size": (view(waiting=(waiting(1), waiting(2))), policy(host_room=None)),
    "a request larger than a host": (
        view(waiting=(waiting(1, dataclasses.replace(ONE, memory_mib=99_999)),)),
        policy(),
    ),
    "hosts on order, one of them late": (
        view(
            hosts=(
                host("h1", state=HostState.STARTING, registered_at=None, heard_at=None, instance=None),
                host(
                    "h2",
                    state=HostState.STARTING,
                    created_at=NOW - timedelta(seconds=61),
                    registered_at=None,
                    heard_at=None,
                ),
            ),
            waiting=(waiting(1),),
        ),
        policy(),
    ),
    "a host that fell silent": (
        view(
            hosts=(
                host("h1", held=FULL, sessions=8, heard_at=NOW - timedelta(seconds=41)),
                host("h2", held=FULL, sessions=8),
            )
        ),
        policy(),
    ),
    "a quiet pool goes to zero": (
        view(hosts=(host("h1", busy_at=LONG_AGO), host("h2", busy_at=LONG_AGO))),
        policy(),
    ),
    "the last host stays a while": (
        view(hosts=(host("h1", busy_at=NOW - timedelta(seconds=120)),)),
        policy(),
    ),
    "a drained host is ended, and only that": (
        view(
            hosts=(
                host("h1", state=HostState.DRAINING, drain=True, draining=True),
                host("h2", state=HostState.DRAINING, drain=True, draining=True, sessions=1, sandboxes=1),
                host("h3", held=ONE, sessions=1),
            )
        ),
        policy(),
    ),
    "a draining host is called back": (
        view(
            hosts=(host("h1", state=HostState.DRAINING, drain=True, sessions=1, sandboxes=1, held=ONE),),
            waiting=(waiting(1),),
        ),
        policy(),
    ),
    "a machine that nobody knows": (
        view(orphans=(InstanceFacts(id="i-9", host=HostId("h9"), alive=True),)),
        policy(),
    ),
    "a prepare, and a later one": (
        view(wanted=(wanted(12), wanted(8, id="later", by=NOW + timedelta(hours=2)))),
        policy(),
    ),
    "warm ones by recent demand": (
        view(
            hosts=(host("h1", held=ONE, sessions=1), host("h2", held=FULL, sessions=8)), recent=(recent(20),)
        ),
        policy(),
    ),
    "headroom for a burst": (
        view(hosts=(host("h1", held=FULL, sessions=8),)),
        policy(headroom_sandboxes=4),
    ),
    "whose time is over": (
        view(
            waiting=(waiting(1, expires_at=NOW),),
            wanted=(wanted(1, id="old", expires_at=NOW),),
            hosts=(host("h1", state=HostState.GONE, instance=None),),
        ),
        policy(),
    ),
}


def plain(value: Any) -> Any:
    """A plan as JSON; what is empty or as by default is left out."""
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {name: plain(each) for name, each in fields.items() if each not in (None, (), {}, False, 0)}
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json", exclude_defaults=True)
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in sorted(value.items())}
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, frozenset | set):
        return sorted(plain(each) for each in value)
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


def kept(scene: str) -> Path:
    """Where the plan of a scene is."""
    return GOLDEN / f"{scene.replace(' ', '-').replace(',', '')}.json"


def written(decided: Plan) -> str:
    return json.dumps(plain(decided), indent=1, sort_keys=True) + "\n"


@pytest.mark.parametrize("scene", sorted(SCENES))
def test_the_plan_of_a_known_scene(scene: str) -> None:
    """What is decided for it, all of it."""
    seen, rules = SCENES[scene]
    path = kept(scene)
    decided = written(plan(seen, rules, NOW))
    if os.environ.get("SHOAL_WRITE_GOLDEN"):
        path.write_text(decided)
    assert decided == path.read_text()


def test_every_kept_plan_has_a_scene() -> None:
    """No file is left of a scene that went."""
    assert set(GOLDEN.glob("*.json")) == {kept(scene) for scene in SCENES}
