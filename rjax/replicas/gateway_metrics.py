"""Metrics of the gateway, beside those of the replicas."""

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

_REASONS = ("prefix", "overloaded", "new", "tag", "other")
_OUTCOMES = ("retried", "lost")
_REJECTIONS = ("bodies_bytes", "connections", "draining")


class GatewayMetrics:
    """Counts what the gateway does. All values of labels come from fixed lists.

    Args:
        model: the model's name.
    """

    def __init__(self, model: str) -> None:
        self._registry = CollectorRegistry()
        self._model = model
        self._running = Gauge(
            "rjax:num_replicas",
            "Replicas that run.",
            ["model_name"],
            registry=self._registry,
        ).labels(model)
        self._routed = Counter(
            "rjax:routed_requests",
            "Requests sent to a replica, by what chose it: its prefix; overloaded, so not the one "
            "with the prefix; new, an unknown prefix; tag, a stored response; other.",
            ["model_name", "reason"],
            registry=self._registry,
        )
        self._failed = Counter(
            "rjax:replica_failures",
            "Requests whose replica died: retried on another, or lost after their first output.",
            ["model_name", "outcome"],
            registry=self._registry,
        )
        self._rejections = Counter(
            "rjax:gateway_rejections",
            "Requests answered with 503 before a replica was chosen, by the exceeded limit.",
            ["model_name", "reason"],
            registry=self._registry,
        )
        for reason in _REJECTIONS:
            self._rejections.labels(model, reason)
        for reason in _REASONS:
            self._routed.labels(model, reason)
        for outcome in _OUTCOMES:
            self._failed.labels(model, outcome)

    def routed(self, reason: str) -> None:
        """Count a request by what decided its replica."""
        self._routed.labels(self._model, reason if reason in _REASONS else "other").inc()

    def rejected(self, reason: str) -> None:
        """Count a request that got a 503; the reason is the name of a limit, or "draining"."""
        assert reason in _REJECTIONS
        self._rejections.labels(self._model, reason).inc()

    def replica_died(self, outcome: str) -> None:
        """Count a request whose replica died; the outcome is "retried" or "lost"."""
        assert outcome in _OUTCOMES
        self._failed.labels(self._model, outcome).inc()

    def exposition(self, num_replicas: int) -> bytes:
        """The metrics in Prometheus' text format."""
        self._running.set(num_replicas)
        return generate_latest(self._registry)
