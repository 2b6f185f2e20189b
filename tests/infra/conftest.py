"""What the examples come to, by `terraform test` with the mocked provider; nothing here reaches AWS.

`make infra` has worked it out before and says where; alone, these tests run Terraform themselves, and are skipped where
it or its provider is not on the machine.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import infra_check
from scripts.infra_check import Resource
from scripts.localstack.terraform import plugin_mirror

States = Callable[[str], dict[str, list[Resource]]]


@pytest.fixture(scope="session")
def states(tmp_path_factory: pytest.TempPathFactory) -> States:
    """The resources of each run of an example's tests that applied, by the run's name."""
    if told := os.environ.get(infra_check.PLANS):
        return lambda example: infra_check.load(Path(told) / f"{example}.json")
    if shutil.which("terraform") is None or plugin_mirror() is None:
        pytest.skip("needs terraform, and its AWS provider in a mirror on this machine")
    workshop = infra_check.Workshop(tmp_path_factory.mktemp("infra"))
    known: dict[str, dict[str, list[Resource]]] = {}

    def states(example: str) -> dict[str, list[Resource]]:
        if example not in known:
            root = f"examples/{example}"
            workshop.init(root)
            known[example] = workshop.states(root)
        return known[example]

    return states


@pytest.fixture
def minimal(states: States) -> list[Resource]:
    """Everything that `infra/examples/minimal` makes."""
    return states("minimal")["whole"]


@pytest.fixture
def production(states: States) -> list[Resource]:
    """Everything that `infra/examples/production` makes, with routers."""
    return states("production")["whole"]
