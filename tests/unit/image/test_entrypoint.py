"""What the agent's container tells its agent, and what it clears away first."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runtime_image.image.entrypoint import (
    KEPT_S,
    YOUNG_S,
    NoTokenError,
    agent_environment,
    own_address,
    remove_leftovers,
)
from runtime_image.image.health import agent_url

NOW_S = 1_800_000_000.0


def told(environ: dict[str, str]) -> dict[str, str]:
    return agent_environment(environ, state=Path("/var/lib/shoal"), address=lambda: "10.1.2.3")


def test_one_token_is_one_home() -> None:
    """The same token finds the same home again; another one is another host."""
    first = told({"SHOAL_AGENT_JOIN_TOKEN": "hst_a.x"})
    assert told({"SHOAL_AGENT_JOIN_TOKEN": "hst_a.x"}) == first
    assert told({"SHOAL_AGENT_JOIN_TOKEN": "hst_b.x"})["SHOAL_AGENT_HOME"] != first["SHOAL_AGENT_HOME"]
    assert first["SHOAL_AGENT_HOME"].startswith("/var/lib/shoal/hosts/")
    assert "hst_a.x" not in first["SHOAL_AGENT_HOME"], "a home's path is for all to see"
    assert first["SHOAL_AGENT_LAYERS_DIR"] == "/var/lib/shoal/layers"


def test_an_agent_on_every_address_tells_its_own() -> None:
    """0.0.0.0 is no address that others reach."""
    assert told({"SHOAL_AGENT_JOIN_TOKEN": "t"})["SHOAL_AGENT_ADVERTISE"] == "http://10.1.2.3:8701"
    one = {"SHOAL_AGENT_JOIN_TOKEN": "t", "SHOAL_AGENT_LISTEN": "127.0.0.1:0"}
    assert "SHOAL_AGENT_ADVERTISE" not in told(one)


def test_what_is_said_wins() -> None:
    """Nothing that was set is replaced."""
    said = {
        "SHOAL_AGENT_JOIN_TOKEN": "t",
        "SHOAL_AGENT_HOME": "/srv/home",
        "SHOAL_AGENT_LISTEN": "0.0.0.0:9000",
        "SHOAL_AGENT_ADVERTISE": "http://agent:9000",
    }
    assert {name: told(said)[name] for name in said} == said


@pytest.mark.parametrize(("index", "token"), [("0", "a"), ("2", "c")])
def test_a_child_of_an_array_takes_its_own_token(index: str, token: str) -> None:
    """All children are given one list; none sees the others' tokens in its agent's environment."""
    environment = told({"SHOAL_AGENT_JOIN_TOKENS": "a b c", "AWS_BATCH_JOB_ARRAY_INDEX": index})
    assert environment["SHOAL_AGENT_JOIN_TOKEN"] == token
    assert "SHOAL_AGENT_JOIN_TOKENS" not in environment


@pytest.mark.parametrize("environ", [{}, {"SHOAL_AGENT_JOIN_TOKENS": "a", "AWS_BATCH_JOB_ARRAY_INDEX": "1"}])
def test_without_a_token_there_is_no_host(environ: dict[str, str]) -> None:
    """A container that nobody ordered ends at once and says why."""
    with pytest.raises(NoTokenError, match="SHOAL_AGENT_JOIN_TOKEN"):
        told(environ)


def test_the_address_is_the_one_on_the_route() -> None:
    """To a control plane on this machine that is the loopback address."""
    assert own_address("http://127.0.0.1:8700/prefix") == "127.0.0.1"


def _home(hosts: Path, name: str, age_s: float) -> Path:
    home = hosts / name
    home.mkdir(parents=True)
    os.utime(home, (NOW_S - age_s, NOW_S - age_s))
    return home


def test_only_what_is_dead_and_old_is_removed(tmp_path: Path) -> None:
    """Mine, those just made and those alive stay; of the dead, sandboxes go at once and journals after a day."""
    mine = _home(tmp_path, "mine", 0)
    _home(tmp_path, "starting", YOUNG_S - 1)
    dead = _home(tmp_path, "dead", YOUNG_S + 1)
    alive = _home(tmp_path, "alive", KEPT_S * 2)
    old = _home(tmp_path, "old", KEPT_S * 2)
    cleaned = []

    def clean(home: Path) -> bool:
        cleaned.append(home)
        return home != alive

    assert remove_leftovers(tmp_path, mine, now_s=NOW_S, clean=clean) == [old]
    assert cleaned == [alive, dead, old]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alive", "dead", "mine", "starting"]
    assert remove_leftovers(tmp_path / "none", mine, now_s=NOW_S, clean=clean) == []


def test_the_health_check_asks_where_the_agent_listens(tmp_path: Path) -> None:
    """At the port it took, on loopback where it listens on every address."""
    with pytest.raises(FileNotFoundError):
        agent_url(tmp_path, "0.0.0.0:8701")
    (tmp_path / "port").write_text("4242")
    assert agent_url(tmp_path, "0.0.0.0:8701") == "http://127.0.0.1:4242/healthz"
    assert agent_url(tmp_path, "127.77.0.2:0") == "http://127.77.0.2:4242/healthz"
