"""The wire format of KV events: msgpack, with the fields and their order of vLLM.

Source: vllm/distributed/kv_events.py of vLLM 0.33.0. A batch is an array; an event is a map with
its ``type``, or, as in earlier versions, an array that begins with it. Fields at their default are
left out of maps and from the end of arrays.
"""

from collections.abc import Iterable
from typing import Any, Literal

import numpy as np

from rjax.engine.kv_events.event_log import CacheEvent, Cleared, Removed, Stored

_MEDIUM = "GPU"  # vLLM's name for the memory that attention reads

type EventFormat = Literal["map", "array"]


def batch(
    events: Iterable[CacheEvent],
    *,
    seconds: float,
    rank: int,
    page_size: int,
    root: bytes,
    event_format: EventFormat,
) -> list[Any]:
    """An ``EventBatch`` as plain values.

    Consecutive stored pages of one chain become one ``BlockStored``, and consecutive removed pages
    one ``BlockRemoved``. Hashes are the 32 bytes of the chain keys. The first page of a chain has
    no parent; if the chain is salted, ``extra_keys`` has its root key, as a hexadecimal text.

    Args:
        events: the events, in order.
        seconds: time of the batch, in seconds since 1970.
        rank: rank of the engine among replicas.
        page_size: tokens of a page.
        root: root key of unsalted chains.
        event_format: format of each event.
    """
    found: list[tuple[str, dict[str, Any]]] = []
    last: bytes | None = None  # key of the last stored page, if it was the last event
    for event in events:
        match event:
            case Stored(key, parent, block, first):
                tokens = np.frombuffer(block, np.int32).tolist()
                if first or parent != last:
                    found.append(("BlockStored", _stored(event, page_size, root)))
                fields = found[-1][1]
                fields["block_hashes"].append(key)
                fields["token_ids"] += tokens
                if fields["extra_keys"] is not None and len(fields["block_hashes"]) > 1:
                    fields["extra_keys"].append(None)
                last = key
            case Removed(key):
                if not found or found[-1][0] != "BlockRemoved":
                    found.append(("BlockRemoved", {"block_hashes": [], "medium": _MEDIUM}))
                found[-1][1]["block_hashes"].append(key)
                last = None
            case Cleared():
                found.append(("AllBlocksCleared", {}))
                last = None
    return [seconds, [_encoded(name, fields, event_format) for name, fields in found], rank]


def _stored(event: Stored, page_size: int, root: bytes) -> dict[str, Any]:
    salted = event.first and event.parent != root
    return {
        "block_hashes": [],
        "parent_block_hash": None if event.first else event.parent,
        "token_ids": [],
        "block_size": page_size,
        "lora_id": None,
        "medium": _MEDIUM,
        "lora_name": None,
        "extra_keys": [[event.parent.hex()]] if salted else None,
    }


def _encoded(name: str, fields: dict[str, Any], event_format: EventFormat) -> Any:
    optional = fields.get("extra_keys", 0) is None
    if optional:
        fields = {key: value for key, value in fields.items() if key != "extra_keys"}
    return {"type": name, **fields} if event_format == "map" else [name, *fields.values()]
