"""The wire format of KV events: msgpack, with the fields and their order of vLLM.

Source: vllm/distributed/kv_events.py of vLLM 0.33.0. A batch is an array; an event is a map with
its ``type``, or, as in earlier versions, an array that begins with it. Fields at their default are
left out of maps and from the end of arrays.

Events of a model with states have vLLM's fields of hybrid models: ``group_idx`` is 0 for KV pages
and 1 for states, whose ``kv_cache_spec_kind`` is vLLM's name for layers with a state, "mamba".
"""

from collections.abc import Iterable, Set
from typing import Any, Literal

import numpy as np

from rjax.engine.kv_events.event_log import KV, STATES, CacheEvent, Cleared, Removed, Stored

_MEDIUM = "GPU"  # vLLM's name for the memory that attention reads
_KINDS = {KV: "full_attention", STATES: "mamba"}  # vLLM's names
_OPTIONAL = ("extra_keys", "group_idx", "kv_cache_spec_kind")  # default None, last in their order

type EventFormat = Literal["map", "array"]


def batch(
    events: Iterable[CacheEvent],
    *,
    seconds: float,
    rank: int,
    page_size: int,
    roots: Set[bytes],
    event_format: EventFormat,
    has_states: bool = False,
) -> list[Any]:
    """An ``EventBatch`` as plain values.

    Consecutive stored pages of one chain become one ``BlockStored``, and consecutive removed pages
    one ``BlockRemoved``. Hashes are the 32 bytes of the chain keys. The first page of a chain has
    no parent; if the chain is salted, ``extra_keys`` has its root key, as a hexadecimal text. An
    event of a state has the hash, the parent and the tokens of the page that it follows.

    Args:
        events: the events, in order.
        seconds: time of the batch, in seconds since 1970.
        rank: rank of the engine among replicas.
        page_size: tokens of a page.
        roots: root keys of unsalted chains.
        event_format: format of each event.
        has_states: whether events name their group.
    """
    found: list[tuple[str, dict[str, Any]]] = []
    last: tuple[bytes, int] | None = None  # key and group of the last event, if it stored a page
    for event in events:
        match event:
            case Stored(key, parent, block, first, group):
                tokens = np.frombuffer(block, np.int32).tolist()
                if first or last != (parent, group):
                    fields = _stored(event, page_size, roots, has_states=has_states)
                    found.append(("BlockStored", fields))
                fields = found[-1][1]
                fields["block_hashes"].append(key)
                fields["token_ids"] += tokens
                if fields["extra_keys"] is not None and len(fields["block_hashes"]) > 1:
                    fields["extra_keys"].append(None)
                last = key, group
            case Removed(key, group):
                of_group = group if has_states else None
                kind, fields = found[-1] if found else ("", {})
                if kind != "BlockRemoved" or fields["group_idx"] != of_group:
                    fields = {"block_hashes": [], "medium": _MEDIUM, "group_idx": of_group}
                    found.append(("BlockRemoved", fields))
                fields["block_hashes"].append(key)
                last = None
            case Cleared():
                found.append(("AllBlocksCleared", {}))
                last = None
    return [seconds, [_encoded(name, fields, event_format) for name, fields in found], rank]


def _stored(
    event: Stored, page_size: int, roots: Set[bytes], *, has_states: bool
) -> dict[str, Any]:
    salted = event.first and event.parent not in roots
    return {
        "block_hashes": [],
        "parent_block_hash": None if event.first else event.parent,
        "token_ids": [],
        "block_size": page_size,
        "lora_id": None,
        "medium": _MEDIUM,
        "lora_name": None,
        "extra_keys": [[event.parent.hex()]] if salted else None,
        "group_idx": event.group if has_states else None,
        "kv_cache_spec_kind": _KINDS[event.group] if has_states else None,
    }


def _encoded(name: str, fields: dict[str, Any], event_format: EventFormat) -> Any:
    if event_format == "map":
        given = {k: v for k, v in fields.items() if k not in _OPTIONAL or v is not None}
        return {"type": name, **given}
    names = [*fields]
    while names and names[-1] in _OPTIONAL and fields[names[-1]] is None:
        names.pop()
    return [name, *(fields[each] for each in names)]
