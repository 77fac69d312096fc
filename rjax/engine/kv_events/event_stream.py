"""The KV events of one engine: the log that its block manager fills, and the publisher."""

from rjax.engine.kv_events.event_log import EventLog
from rjax.engine.kv_events.publisher import KvEventPublisher
from rjax.engine.stats import EngineStats
from rjax.kv_events_config import kv_events_config


class KvEventStream:
    """Publishes what the log collected, after each step.

    Args:
        publisher: of the engine.

    Attributes:
        log: for the block manager.
    """

    def __init__(self, publisher: KvEventPublisher) -> None:
        self.log = EventLog()
        self._publisher = publisher

    def flush(self, stats: EngineStats) -> None:
        """Hand the events since the last call to the publisher, and count the batches."""
        if self.log.events:
            self._publisher.publish(self.log.take())
        stats.kv_event_batches = self._publisher.published
        stats.kv_event_batches_dropped = self._publisher.dropped

    def close(self) -> None:
        """See `KvEventPublisher.close`."""
        self._publisher.close()


def open_kv_events(given: object, page_size: int, root: bytes) -> KvEventStream | None:
    """The stream that an engine's options ask for; None without events.

    Args:
        given: the option ``kv_events_config``.
        page_size: tokens of a page.
        root: root key of the prefix cache's unsalted chains.

    Raises:
        InvalidConfigError: see `KvEventPublisher`.
    """
    config = kv_events_config(given)
    if config is None or not config.published:
        return None
    return KvEventStream(KvEventPublisher(config, page_size, root))
