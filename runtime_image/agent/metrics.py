"""The agent's numbers, for Prometheus and for the heartbeat's counters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from runtime_image.agent.heartbeat import Heart
from runtime_image.agent.metering import UsageQueue
from runtime_image.agent.service import SandboxService
from runtime_image.agent.snapshots import Snapshots
from runtime_image.agent.warm import WarmPool


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Where the numbers come from."""

    service: SandboxService
    warm: WarmPool
    snapshots: Snapshots
    heart: Heart
    usage: UsageQueue


class AgentMetrics:
    """Reads the numbers when asked; nothing is counted twice."""

    def __init__(self, sources: Sources) -> None:
        self._from = sources
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """In Prometheus's text format."""
        return generate_latest(self._registry)

    def counters(self) -> dict[str, float]:
        """What heartbeats carry: totals since this agent started."""
        return {name: read() for name, _, read in self._counters()}

    def _counters(self) -> list[tuple[str, str, Callable[[], float]]]:
        one = self._from
        return [
            ("warm_hits", "Sandboxes handed over from the warm pool.", lambda: one.warm.hits),
            ("warm_misses", "Claims that found no warm sandbox.", lambda: one.warm.misses),
            ("warm_dead", "Warm sandboxes found dead at hand-over.", lambda: one.warm.dead),
            ("warm_evicted", "Warm sandboxes that gave way to sessions.", lambda: one.warm.evicted),
            ("warm_started", "Warm sandboxes started.", lambda: one.warm.started),
            (
                "sandboxes_refused",
                "Sandboxes that were refused for want of room.",
                lambda: one.service.refused,
            ),
            ("snapshots_taken", "Snapshots taken.", lambda: one.snapshots.taken),
            ("snapshots_failed", "Snapshots that failed.", lambda: one.snapshots.failed),
            ("heartbeats", "Heartbeats that were acknowledged.", lambda: one.heart.beats),
            ("heartbeats_missed", "Heartbeats that were not.", lambda: one.heart.missed),
            ("usage_dropped", "Usage records dropped because nobody took them.", lambda: one.usage.dropped),
        ]

    def collect(self) -> Iterator[Metric]:
        """For the registry."""
        for name, about, read in self._counters():
            counter = CounterMetricFamily(f"shoal_agent_{name}", about)
            counter.add_metric([], read())
            yield counter
        service = self._from.service
        states: dict[str, int] = dict.fromkeys(
            ("starting", "running", "paused", "ending", "ended", "failed"), 0
        )
        running = 0
        for hosted in service:
            states[hosted.state] += 1
            running += hosted.actions.running if hosted.actions is not None else 0
        sandboxes = GaugeMetricFamily("shoal_agent_sandboxes", "Sandboxes of sessions.", labels=["state"])
        for state, count in states.items():
            sandboxes.add_metric([state], count)
        yield sandboxes
        warm = self._from.warm.report()
        yield GaugeMetricFamily(
            "shoal_agent_warm_ready", "Warm sandboxes.", value=sum(one.ready for one in warm)
        )
        yield GaugeMetricFamily("shoal_agent_actions_running", "Steps that run now.", value=running)
        yield GaugeMetricFamily(
            "shoal_agent_fenced", "1 while this host refuses work.", value=int(service.fenced)
        )
        for kind, amount in (("reserved", service.reserved()), ("capacity", service.capacity)):
            held = GaugeMetricFamily(f"shoal_agent_{kind}", f"What is {kind}.", labels=["resource"])
            for resource, value in amount.model_dump().items():
                held.add_metric([resource], value)
            yield held
