"""Options of KV events, under vLLM's names."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Literal, no_type_check

from rjax.errors import InvalidConfigError, near_miss

_MOST = 2**31 - 1


@no_type_check  # user input is checked by hand, with readable messages
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KvEventsConfig:
    """How the engine publishes what its prefix cache stores and removes.

    Attributes:
        enable_kv_cache_events: publish the events.
        publisher: "zmq", or "null" to publish nothing; by default zmq if events are enabled.
        endpoint: address of the PUB socket. As in vLLM an address with ``*`` or ``::``, and one of
            ipc or inproc, is bound; any other is connected to. By default tcp://127.0.0.1:5557 is
            bound, for subscribers on this machine (vLLM: tcp://*:5557).
        replay_endpoint: address that a ROUTER socket is bound to, from which subscribers get
            batches that they missed; None for none.
        buffer_steps: batches that can be replayed.
        hwm: messages that the PUB socket keeps for a slow subscriber; more are lost.
        max_queue_size: batches that wait for the publisher; more are dropped and counted.
        topic: first frame of every message.
        event_format: events as maps with their ``type``, as vLLM 0.33 sends them, or as arrays that
            begin with it ("array"), as earlier versions did and as some subscribers expect.
        data_parallel_rank: rank of this engine among replicas; it is in every batch and added to
            the ports.

    Raises:
        InvalidConfigError: a value is out of range.
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] | None = None
    endpoint: str | None = None
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    event_format: Literal["map", "array"] = "map"
    data_parallel_rank: int = 0

    def __post_init__(self) -> None:
        for name, kind in (
            ("enable_kv_cache_events", bool),
            ("endpoint", str | None),
            ("replay_endpoint", str | None),
            ("topic", str),
        ):
            if not isinstance(getattr(self, name), kind):
                raise _wrong(name, getattr(self, name), "a value of the type in the documentation")
        for name, least in (
            ("buffer_steps", 1),
            ("hwm", 1),
            ("max_queue_size", 1),
            ("data_parallel_rank", 0),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MOST:
                raise _wrong(name, value, f"a whole number from {least}")
        if self.publisher not in (None, "null", "zmq"):
            raise _wrong("publisher", self.publisher, '"zmq" or "null"')
        if self.event_format not in ("map", "array"):
            raise _wrong("event_format", self.event_format, '"map" or "array"')
        for name in ("endpoint", "replay_endpoint"):
            value = getattr(self, name)
            if value is not None and not value.startswith(("tcp://", "ipc://", "inproc://")):
                raise _wrong(name, value, "an address such as tcp://*:5557 or ipc:///run/events")

    @property
    def published(self) -> bool:
        """Whether events are published."""
        return self.enable_kv_cache_events and self.publisher != "null"


def kv_events_config(given: object) -> KvEventsConfig | None:
    """The options in a mapping, or in the JSON text of one.

    Raises:
        InvalidConfigError: they are not of this form, or one is unknown or out of range.
    """
    if given is None or isinstance(given, KvEventsConfig):
        return given
    found: Any = given
    if isinstance(given, str):
        try:
            found = json.loads(given)
        except ValueError:
            found = None
    if not isinstance(found, Mapping):
        raise InvalidConfigError(
            f"kv_events_config is {given!r}; give JSON such as "
            '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}'
        )
    names = [field.name for field in dataclasses.fields(KvEventsConfig)]
    for name in found:
        if name not in names:
            near = near_miss(name, names)
            raise InvalidConfigError(f"unknown option {name!r} of kv_events_config; {near}")
    return KvEventsConfig(**found)


def _wrong(name: str, value: object, allowed: str) -> InvalidConfigError:
    return InvalidConfigError(f"{name} of kv_events_config is {value!r}; give {allowed}")
