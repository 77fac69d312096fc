"""Decides the number of replicas by queue and KV use."""

import math
from collections.abc import Mapping
from typing import Any


class QueueAndKvPolicy:
    """An autoscaling policy of Ray Serve over what `Replica.record_autoscaling_stats` reports.

    The number of replicas is such that neither sequences nor KV use exceed their targets, if they
    spread evenly. Ray applies the limits and the delays.

    Args:
        target_ongoing_requests: sequences of a replica; None takes its ``max_num_seqs``.
        target_kv_usage: share of a replica's KV pool.
    """

    def __init__(self, target_ongoing_requests: float | None, target_kv_usage: float) -> None:
        self._target = target_ongoing_requests
        self._target_kv_usage = target_kv_usage

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The desired number and no state, for Ray's ``AutoscalingContext``."""
        found: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        running = set(context.running_replicas)
        figures = {
            name: [value for replica, value in values.items() if replica in running]
            for name, values in found.items()
        }
        queued = float(context.total_queued_requests or 0)
        if not figures.get("sequences"):
            # No replica reported yet: keep their number, but have one for those who wait.
            return max(context.target_num_replicas, int(queued > 0)), {}
        return self.desired(**figures, queued=queued), {}

    def desired(
        self,
        *,
        sequences: list[float],
        max_num_seqs: list[float],
        kv_usage: list[float],
        queued: float = 0.0,
    ) -> int:
        """The number of replicas for the load of the running ones.

        Args:
            sequences: running and waiting sequences of each replica.
            max_num_seqs: most sequences that each replica decodes at once.
            kv_usage: share of each KV pool in use.
            queued: requests that no replica has taken yet.
        """
        target = self._target or max(max_num_seqs)
        by_queue = (sum(sequences) + queued) / target
        by_kv = sum(kv_usage) / self._target_kv_usage
        return max(1, math.ceil(max(by_queue, by_kv) - 1e-9))
