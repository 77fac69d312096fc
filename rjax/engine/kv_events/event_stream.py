"""The KV events of one engine: the log that its block manager fills, and the publisher."""

from rjax.config import CacheSettings
from rjax.config.kv_events import kv_events_config
from rjax.engine.kv_events.event_log import EventLog
from rjax.engine.kv_events.publisher import KvEventPublisher
from rjax.engine.stats import EngineStats


class KvEventStream:
    """Publishes what the log collected, after each step. Without events it does nothing.

    Args:
        settings: options of the KV pool.
        root: root key of the prefix cache's unsalted chains.
        has_states: whether the model has states, which are events of a group of their own.

    Attributes:
        log: the log that the pools of pages and of states fill; None without events.

    Raises:
        InvalidConfigError: see `KvEventPublisher`.
    """

    def __init__(self, settings: CacheSettings, root: bytes, *, has_states: bool = False) -> None:
        self.log: EventLog | None = None
        self._roots = {root}
        self._publisher: KvEventPublisher | None = None
        config = kv_events_config(settings.kv_events_config)
        if config is not None and config.published:
            self._publisher = KvEventPublisher(
                config, settings.page_size, self._roots, has_states=has_states
            )
            self.log = EventLog(self._publisher.publish)

    def add_root(self, root: bytes) -> None:
        """Take note of the root key of unsalted chains of new weights."""
        self._roots.add(root)

    def flush(self, stats: EngineStats) -> None:
        """Hand the events since the last call to the publisher, and count the batches."""
        if self.log is None or self._publisher is None:
            return
        self.log.flush()
        stats.kv_event_batches = self._publisher.published
        stats.kv_event_batches_dropped = self._publisher.dropped

    def close(self) -> None:
        """See `KvEventPublisher.close`."""
        if self._publisher is not None:
            self._publisher.close()
