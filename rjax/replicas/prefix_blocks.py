"""Hash chains over the blocks of a request's prompt, in text.

They stand for the chains of the prefix cache's pages (`rjax.batch.page_hash`) without tokenising:
requests whose prompts begin with equal pages have equal leading blocks. The order of parts is that
of chat templates: tools, then messages.
"""

import hashlib
import json
from typing import Any

BLOCK_BYTES = 256
"""UTF-8 bytes of a block, about a page of 64 tokens."""

_MOST_BLOCKS = 512  # of a request; later text no longer changes the choice
_DIGEST = 12  # bytes of a key
_ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/invocations")


def prefix_blocks(path: str, fields: dict[str, Any], tenant: str) -> tuple[bytes, ...]:
    """The chain of keys of a request's prompt; empty if the body has none.

    The replica validates the body, so whatever is unexpected here is left out.

    Args:
        path: path of the route, without a root path.
        fields: fields of the body.
        tenant: name of the client's tenant; tenants share no KV.
    """
    if path not in _ROUTES:
        return ()
    text: list[str] = []
    if isinstance(prefix := fields.get("prefix"), str):
        text.append(f"\0prefix\0{prefix}")
    if tools := fields.get("tools"):
        text.append(_as_json(tools))
    for name in ("instructions", "messages", "input", "prompt"):
        if name in fields:
            text.append(_text_of(fields[name]))
    salt = fields.get("cache_salt")
    return _chain("\0".join((tenant, salt if isinstance(salt, str) else "")), "".join(text))


def _chain(root: str, text: str) -> tuple[bytes, ...]:
    data = text.encode("utf-8", "surrogatepass")[: _MOST_BLOCKS * BLOCK_BYTES]
    key = _digest(root.encode("utf-8", "surrogatepass"))
    keys = []
    for start in range(0, len(data), BLOCK_BYTES):
        key = _digest(key + data[start : start + BLOCK_BYTES])
        keys.append(key)
    return tuple(keys)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST).digest()


def _text_of(value: Any) -> str:
    """The text of messages, input items, parts of text or token ids, in order."""
    match value:
        case str():
            return value
        case {"role": str(role), **rest}:
            return f"\0{role}\0{_text_of(rest.get('content'))}{_calls(rest)}"
        case {"text": str(text)}:
            return text
        case [int(), *_]:
            return " ".join(map(str, value))
        case list():
            return "".join(map(_text_of, value))
        case None:
            return ""
    return _as_json(value)


def _calls(message: dict[str, Any]) -> str:
    return _as_json(calls) if (calls := message.get("tool_calls")) else ""


def _as_json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
