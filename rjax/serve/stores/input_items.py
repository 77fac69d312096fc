"""The input items of a stored response, paginated as in OpenAI's API."""

import json
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel
from starlette.datastructures import QueryParams

from rjax.serve.protocol.errors import ApiError
from rjax.serve.protocol.responses_api_requests import (
    FunctionCallItem,
    FunctionOutputItem,
    Item,
    MessageItem,
    ReasoningItem,
    Refusal,
)

_MAX_LIMIT = 100  # items of a page
_DEFAULT_LIMIT = 20
_PARAMETERS = ("after", "limit", "order")
_IGNORED = ("include", "include[]")  # there is nothing to include


class InputItem(NamedTuple):
    """A stored item: its id, and its JSON including the id."""

    id: str
    data: bytes


class InputItemPage(BaseModel):
    """Response of GET /v1/responses/{response_id}/input_items."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


def stored_items(given: str | list[Item], response_id: str) -> tuple[InputItem, ...]:
    """Convert a request's input to items for storage, in the same order.

    Args:
        given: the input; a text is a user message.
        response_id: id of the response; item ids are derived from it.
    """
    if isinstance(given, str):
        given = [MessageItem(role="user", content=given)]
    name = response_id.removeprefix("resp_")
    return tuple(_stored(item, f"{name}{i:06d}") for i, item in enumerate(given))


def page(items: tuple[InputItem, ...], query: QueryParams) -> bytes:
    """The JSON of a page of items.

    Args:
        items: all items, in the order of the input.
        query: ``order``, by default "desc" (newest first); ``limit``, by default 20; ``after``, the
            id of the last item of the previous page.

    Raises:
        ApiError: 400, or 404 if ``after`` is not the id of an item.
    """
    limit, newest_first = _asked(query)
    found = items[::-1] if newest_first else items
    after = query.get("after")
    if after is not None:
        place = next((i for i, item in enumerate(found) if item.id == after), None)
        if place is None:
            raise ApiError(
                404,
                f"the response has no input item {after[:100]!r}; give the last_id of a page",
                code="item_not_found",
                param="after",
            )
        found = found[place + 1 :]
    shown = found[:limit]
    rest = {
        "first_id": shown[0].id if shown else None,
        "last_id": shown[-1].id if shown else None,
        "has_more": len(found) > limit,
    }
    data = b",".join(item.data for item in shown)
    return b'{"object":"list","data":[' + data + b"]," + json.dumps(rest).encode()[1:]


def _asked(query: QueryParams) -> tuple[int, bool]:
    """Items per page, and whether the newest come first."""
    for name in query:
        if name not in (*_PARAMETERS, *_IGNORED):
            raise ApiError(
                400,
                f"{name[:100]!r} is not a parameter of this route; it has {', '.join(_PARAMETERS)}",
                code="unknown_parameter",
                param=name[:100],
            )
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order is {order[:100]!r}; give asc or desc", param="order")
    limit = query.get("limit", str(_DEFAULT_LIMIT))
    if not (
        limit.isascii() and limit.isdigit() and len(limit) < 9 and 1 <= int(limit) <= _MAX_LIMIT
    ):
        raise ApiError(
            400,
            f"limit is {limit[:100]!r}; give a whole number of 1 to {_MAX_LIMIT}",
            param="limit",
        )
    return int(limit), order == "desc"


def _stored(item: Item, name: str) -> InputItem:
    match item:
        case MessageItem():
            name = f"msg_{name}"
            fields = {"role": item.role, "content": _content(item)}
        case FunctionCallItem():
            name = f"fc_{name}"
            fields = {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
        case FunctionOutputItem():
            name = f"fco_{name}"
            output = item.output
            told = output if isinstance(output, str) else _dumped(output)
            fields = {"call_id": item.call_id, "output": told}
        case ReasoningItem():
            name = f"rs_{name}"
            fields: dict[str, Any] = {"summary": _dumped(item.summary or ())}
            if item.content:
                fields["content"] = _dumped(item.content)
    made = {"id": name, "type": item.type, "status": "completed", **fields}
    # Escape unpaired surrogates, as json.dumps with ensure_ascii does.
    text = json.dumps(made, ensure_ascii=False, separators=(",", ":"))
    return InputItem(name, text.encode("utf-8", "backslashreplace"))


def _content(item: MessageItem) -> list[dict[str, Any]]:
    """The content parts of a message; assistant messages have output parts."""
    kind = "output_text" if item.role == "assistant" else "input_text"
    rest = {"annotations": []} if item.role == "assistant" else {}
    if isinstance(item.content, str):
        return [{"type": kind, "text": item.content, **rest}]
    return [
        {"type": "refusal", "refusal": part.refusal}
        if isinstance(part, Refusal)
        else {"type": kind, "text": part.text, **rest}
        for part in item.content
    ]


def _dumped(parts: Iterable[BaseModel]) -> list[dict[str, Any]]:
    return [part.model_dump() for part in parts]
