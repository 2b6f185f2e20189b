"""What `/metrics` tells, in Prometheus' words.

Counters and histograms of this process are kept as requests go by; what is in the store (sessions, hosts, queue) is
read when somebody scrapes, so that any replica tells the same.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)

#: What is read from the store at a scrape: name -> (help, label or None).
LEVELS: dict[str, tuple[str, str | None]] = {
    "shoal_sessions": ("Sessions, by state.", "state"),
    "shoal_hosts": ("Hosts, by state.", "state"),
    "shoal_queue_length": ("Sessions that wait for a place.", None),
    "shoal_queue_age_seconds": ("How long the first of them has waited.", None),
    "shoal_warm_sandboxes": ("Warm sandboxes that are ready.", None),
    "shoal_store_counts": (
        "What this process asked of the store of state since its start, and what it ran into, by kind: repeated; with "
        "DynamoDB also calls by operation, read_units, write_units, throttled, conflicts, refused (a condition did not "
        "hold), unavailable, unprocessed, shed, and how many calls may run at once (limit) and wait (waiting) now.",
        "kind",
    ),
    "shoal_blob_troubles": (
        "What this process's calls of S3 ran into since its start, by kind: throttled, conflicts, repeated, "
        "resumed, aborts_failed.",
        "kind",
    ),
}


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
        self._creates = Counter(
            "shoal_session_creates_total",
            "Sessions asked for, by outcome of the call: warm, cold (from the warm pool or not), pending (on its way "
            "when the call returned), ended, existing (found by name or key), refused.",
            ["outcome"],
            registry=self.registry,
        )
        self.in_flight = Gauge("shoal_http_in_flight", "Requests being answered now.", registry=self.registry)
        self._levels = {
            name: Gauge(name, text, [label] if label else [], registry=self.registry)
            for name, (text, label) in LEVELS.items()
        }
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

    def created(self, outcome: str) -> None:
        """Count one session asked for."""
        self._creates.labels(outcome).inc()

    def set_level(self, name: str, value: float | Mapping[str, float]) -> None:
        """Set one of `LEVELS`: a number, or one for each value of its label."""
        gauge = self._levels[name]
        if isinstance(value, Mapping):
            gauge.clear()
            for key, one in value.items():
                gauge.labels(key).set(one)
        else:
            gauge.set(value)

    def render(self) -> bytes:
        """The text that a scrape gets."""
        return generate_latest(self.registry)
