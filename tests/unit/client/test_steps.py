"""Ids of steps: the same on every run, never shared by two that act apart."""

from __future__ import annotations

import copy
import os
import pickle
import threading

import pytest

from shoal.client.errors import InvalidRequest
from shoal.client.steps import StepCounter


def test_ids_count_up() -> None:
    """step-1, step-2, ...; snapshots are counted apart."""
    steps = StepCounter()
    assert [steps.next(), steps.next_of("snapshot"), steps.next()] == ["step-1", "step-snapshot-1", "step-2"]


def test_threads_never_get_the_same_id() -> None:
    """A counter shared by threads gives each id once."""
    steps = StepCounter()
    seen: list[str] = []

    def take() -> None:
        seen.extend(steps.next() for _ in range(500))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(seen)) == 4000


def script() -> list[str]:
    steps = StepCounter()
    steps.next()
    first = pickle.loads(pickle.dumps(steps))
    second = copy.copy(steps)
    return [
        first.next(),
        first.next(),
        second.next(),
        steps.next(),
        pickle.loads(pickle.dumps(second)).next(),
    ]


def test_copies_count_in_spaces_of_their_own() -> None:
    """No id of a copy is one of the original or of another copy."""
    ids = script()
    assert ids == ["step-1+1-1", "step-1+1-2", "step-1+2-1", "step-2", "step-1+2-1+1-1"]
    assert len(set(ids)) == len(ids)


def test_the_spaces_are_the_same_on_every_run() -> None:
    """Or a restarted script would not fast-forward in its copies."""
    assert script() == script()


def test_the_same_pickle_loaded_twice_is_the_same_task_again() -> None:
    """A task that is repeated with the same bytes fast-forwards."""
    raw = pickle.dumps(StepCounter())
    assert pickle.loads(raw).next() == pickle.loads(raw).next()


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # from Python 3.12 on
def test_a_forked_child_counts_in_a_space_of_its_own() -> None:
    """The child's ids are neither the parent's next ones nor another child's."""
    steps = StepCounter()
    steps.next()
    told: list[str] = []
    for _ in range(2):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write, steps.next().encode())
            os._exit(0)
        os.close(write)
        told.append(os.read(read, 100).decode())
        os.close(read)
        os.waitpid(child, 0)
    told.append(steps.next())
    assert len(set(told)) == 3
    assert told[2] == "step-2"
    assert all(told_id.startswith("step-1+f") for told_id in told[:2])


def test_a_prefix_must_make_valid_ids() -> None:
    """What the service would refuse is refused at once."""
    with pytest.raises(InvalidRequest):
        StepCounter("no spaces")
