"""`shoal simulate`: what is wanted of planner and placement, on smaller scenarios, as counts and virtual times."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from provisioner.placement import Room
from provisioner.settings import PoolSettings
from provisioner.simulate import loop
from provisioner.simulate.__main__ import main
from provisioner.simulate.measures import percentiles
from provisioner.simulate.optimum import Held, host_seconds, needed
from provisioner.simulate.real import simulate_real
from provisioner.simulate.report import Results, simulate
from provisioner.simulate.scenario import HostModel, LoadModel, PrepareModel, Scenario, SpotModel, names, read
from shoal.contract.host import Capacity

SHAPE = Capacity(cpu_millis=64_000, memory_mib=65_536, disk_mib=262_144, sandboxes=40)


def scenario(**changes: object) -> Scenario:
    pool = {
        "max_hosts": 60,
        "host_capacity": SHAPE,
        "idle_to_zero_s": 120.0,
        "warm_default": 0,
        "warm_max": 0,
    }
    pool |= changes.pop("pool", {})  # type: ignore[arg-type]
    about: dict[str, object] = {"name": "test", "duration_s": 600.0, "pool": PoolSettings(**pool)}  # type: ignore[arg-type]
    return Scenario(**(about | changes))  # type: ignore[arg-type]


def within_limits(results: Results) -> None:
    for name, use in results["aws"].items():
        assert use["used"] <= 0.80, name
        assert use["over"] == 0, name


def test_a_square_wave_meets_what_is_wanted() -> None:
    """Steps with a pause: after the first wave nobody waits for a host, the host-hours stay near the least possible,
    no AWS limit is used by more than four fifths, everybody runs, and at the end there are no hosts."""
    steps = LoadModel(sessions=600, within_s=5, every_s=600, times=4, hold_s=(480, 540))
    results, measures = simulate(
        scenario(load=(steps,), duration_s=2900.0, first_wave_s=60.0, pool={"scale_in_cooldown_s": 90.0})
    )
    assert results["ran"] == results["sessions"] == 2400
    assert results["queue_s"]["later"]["p95"] <= results["host_start_s"]["p95"] / 10
    assert results["queue_s"]["first_wave"]["p95"] <= 1.2 * results["host_start_s"]["max"]
    assert results["hosts"]["over_optimum"] <= 1.3
    assert results["hosts"]["most"] == 15
    assert measures.samples[-1][3] == 0
    within_limits(results)


def test_a_burst_on_stale_views_spreads() -> None:
    """5,000 within a second, heartbeats up to 3 s late, eight replicas that know their own placements only: the fullest
    host has at most 1.2 times the mean, where random choices and the least loaded of the stale view do worse."""
    burst = read("burst")
    spread = simulate(burst)[0]["spread"]
    assert spread["hosts"] == 40
    assert spread["max_over_mean"] <= 1.2
    other = simulate(burst, policy="random")[0]["spread"]
    assert other["max_over_mean"] > spread["max_over_mean"]


def test_a_prepare_is_ready_at_its_time_and_not_much_sooner() -> None:
    """Hosts of a prepare are started late enough not to stand idle, early enough that nobody waits for one."""
    few = LoadModel(sessions=5, hold_s=(30, 40))
    many = LoadModel(at_s=500, sessions=400, hold_s=(60, 80))
    results, measures = simulate(
        scenario(
            load=(few, many),
            prepare=(PrepareModel(at_s=5, by_s=500, sandboxes=400, load=1),),
            duration_s=650.0,
            first_wave_s=10.0,
            pool={"warm_max": 16},
        )
    )
    assert results["queue_s"]["later"]["p95"] < 3.0
    first_s = min(each[0] for each in measures.samples if each[3] >= 10)
    slowest = results["host_start_s"]["max"]
    assert 500 - slowest - 30 <= first_s <= 500 - slowest / 2


def test_lost_hosts_and_slow_ones_lose_no_session() -> None:
    """A tenth of the hosts taken back at once, a fifth slow and some that never come: all sessions run, and those that
    lost their host run again before a host start is over, since headroom is kept."""
    waves = LoadModel(sessions=400, within_s=5, every_s=330, times=2, hold_s=(250, 280))
    results, _ = simulate(
        scenario(
            load=(waves,),
            spot=(SpotModel(at_s=250, share=0.1),),
            hosts=HostModel(slow_share=0.2, slow_times=2.0, fail_share=0.03),
            duration_s=1300.0,
            first_wave_s=60.0,
            pool={"headroom_share": 0.15, "scale_in_cooldown_s": 120.0},
        )
    )
    assert results["hosts"]["lost_to_spot"] >= 1
    assert results["hosts"]["sessions_moved"] >= 30
    assert results["waiting_at_end"] == 0
    assert results["ran"] == 800
    assert results["queue_s"]["restored"]["p95"] < results["host_start_s"]["p50"]
    within_limits(results)


@pytest.mark.slow
def test_the_lean_model_agrees_with_the_use_cases() -> None:
    """The use cases themselves, run end to end on the same load, start as many hosts, pay within a tenth as much for
    them, and let sessions wait as long within a tenth or half a second, in the first wave and after it."""
    small = read("small")
    real = simulate_real(small)
    lean, measures = simulate(small)
    assert len(real.waits_s) == lean["ran"] == lean["sessions"]
    assert real.hosts_started == lean["hosts"]["started"]
    assert real.host_seconds / 3600 == pytest.approx(lean["hosts"]["hours"], rel=0.1)
    for mine, theirs in (
        (measures.first_s, [wait for wait in real.waits_s if wait > 10]),
        (measures.later_s, [wait for wait in real.waits_s if wait <= 10]),
    ):
        assert len(mine) == len(theirs)
        for rank in ("p50", "p95"):
            assert percentiles(mine)[rank] == pytest.approx(percentiles(theirs)[rank], rel=0.1, abs=0.5)
    assert abs(real.refused / len(real.waits_s) - measures.refused / len(real.waits_s)) < 0.3
    assert real.spreads[-1][1] / real.spreads[-1][2] == pytest.approx(
        lean["spread"]["max_over_mean"], rel=0.1
    )


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.integers(0, 1000), st.integers(1, 300)).map(
            lambda each: (Room(sandboxes=each[0]), float(each[1]), float(each[1] + each[2]))
        ),
        min_size=1,
        max_size=20,
    ),
    st.integers(0, 60),
)
def test_nobody_pays_less_than_the_optimum(held: list[Held], start_s: int) -> None:
    """Neither keeping hosts from first to last, nor starting one for every need anew, is cheaper."""
    capacity = Room(sandboxes=10)
    steps = needed(held, capacity)
    best = host_seconds(steps, start_s, 2000.0)
    most = max(hosts for _, hosts in steps)
    first, last = min(each[1] for each in held), max(each[2] for each in held)
    assert best <= most * (start_s + last - first) + 1e-6
    run_s = sum((end - begin) * hosts for (begin, hosts), (end, _) in itertools.pairwise(steps))
    assert best >= run_s - 1e-6
    rises = sum(
        max(0, after - before) for (_, before), (_, after) in zip([(0, 0), *steps], steps, strict=False)
    )
    assert best <= run_s + rises * start_s + 1e-6


def test_the_optimum_keeps_hosts_over_short_pauses() -> None:
    """A pause shorter than a start is waited out, a longer one is not."""
    capacity = Room(sandboxes=1)

    def cost(pause_s: float) -> float:
        held = [(capacity, 0.0, 100.0), (capacity, 100.0 + pause_s, 200.0 + pause_s)]
        return host_seconds(needed(held, capacity), 40.0, 1000.0)

    assert cost(10.0) == 40 + 100 + 10 + 100
    assert cost(500.0) == 2 * (40 + 100)


def test_equal_seeds_give_equal_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same seed gives the same figures and the same plot to the byte; another seed does not."""

    def run(seed: int, name: str) -> tuple[dict[str, object], bytes]:
        assert main(["small", "--json", "--seed", str(seed), "--plots", str(tmp_path / name)]) == 0
        told = json.loads(capsys.readouterr().out)
        told.pop("took_s")
        return told, (tmp_path / name / "small-pool.svg").read_bytes()

    pytest.importorskip("matplotlib")
    one, again, other = run(1, "a"), run(1, "b"), run(2, "c")
    assert one == again
    assert one[0] != other[0]


def test_every_scenario_reads_and_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """All that come with it are valid and listed; what is none is refused with a sentence."""
    assert main(["--list"]) == 0
    listed = capsys.readouterr().out
    for name in names():
        assert read(name).about
        assert name in listed
    assert main(["no-such-scenario"]) == 2
    assert "no-such-scenario" in capsys.readouterr().err


def test_virtual_time_ends_what_waits_for_nothing() -> None:
    """A wait that nothing will ever end is told, not waited for."""

    async def never() -> None:
        import asyncio

        await asyncio.Event().wait()

    with pytest.raises(loop.Stuck):
        loop.run(never())
