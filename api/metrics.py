"""What `/metrics` tells, in Prometheus' words.

Counters and histograms of this process are kept as requests go by; what is in the store (sessions, hosts, queue) is
read when somebody scrapes, so that any replica tells the same.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)


class Metrics:
    """The metrics of one API process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "shoal_http_requests_total",
            "Requests answered, by route template, method and status.",
            ["route", "method", "status"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "shoal_http_request_seconds",
            "Time from the request's head to the end of its answer; long polls and streams included.",
            ["route"],
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self._relayed = Counter(
            "shoal_relay_total",
            "Requests relayed to agents, by outcome: ok, error (the agent's own), retried, unreachable.",
            ["outcome"],
            registry=self.registry,
        )
        self.in_flight = Gauge("shoal_http_in_flight", "Requests being answered now.", registry=self.registry)
        self._gauges: dict[str, Gauge] = {}
        self._children: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}
        self._outcomes: dict[str, Counter] = {}

    def observe(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count one request; children are kept at hand because the lookup by labels costs more than the count."""
        children = self._children.get((route, method, status))
        if children is None:
            children = (self._requests.labels(route, method, str(status)), self._seconds.labels(route))
            self._children[(route, method, status)] = children
        children[0].inc()
        children[1].observe(seconds)

    def relayed(self, outcome: str) -> None:
        """Count one relayed request."""
        child = self._outcomes.get(outcome)
        if child is None:
            child = self._outcomes[outcome] = self._relayed.labels(outcome)
        child.inc()

    def set_level(
        self, name: str, help_text: str, values: Mapping[str, float], label: str | None = None
    ) -> None:
        """Set a gauge that is read from the store: one value, or one for each value of `label`.

        Args:
            values: By the label's value; without a label, the single value under the empty string.
        """
        gauge = self._gauges.get(name)
        if gauge is None:
            gauge = Gauge(name, help_text, [label] if label else [], registry=self.registry)
            self._gauges[name] = gauge
        if label is None:
            gauge.set(values.get("", 0.0))
            return
        gauge.clear()
        for key, value in values.items():
            gauge.labels(key).set(value)

    def render(self) -> bytes:
        """The text that a scrape gets."""
        return generate_latest(self.registry)
