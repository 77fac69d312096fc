"""JSON responses serialised in chunks, so that large ones do not block the event loop."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rjax.outputs import RequestOutput
from rjax.sampling import SamplingParams
from rjax.serve.http.threads import WorkThreads

_ENTRIES = 128  # list entries per chunk
_BYTES = 64 * 2**10  # per send
_SMALL = 8192  # tokens and alternatives of a response that is serialised on the event loop
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class ChunkedJSONResponse(Response):
    """A JSON response that is sent in chunks, no faster than the client reads.

    Args:
        pieces: chunks of the body.
    """

    media_type = "application/json"

    def __init__(self, pieces: list[bytes]) -> None:
        super().__init__(headers={"Content-Length": str(sum(map(len, pieces)))})
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the chunks."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def chunked_response(
    make: Callable[[], BaseModel], size: int, threads: WorkThreads
) -> ChunkedJSONResponse:
    """The response that ``make`` returns, serialised in chunks.

    Args:
        make: makes the response; called once.
        size: size of the response (`response_size`); a large one is made on a thread.
        threads: threads that make large responses.
    """

    def pieces() -> list[bytes]:
        return list(_blocks(iter_json(make())))

    return ChunkedJSONResponse(await threads.run(pieces) if is_large(size) else pieces())


def is_large(size: int) -> bool:
    """Whether a response of this size (`response_size`) should be serialised on a thread."""
    return size > _SMALL


def split_bytes(data: bytes) -> list[bytes]:
    """Split bytes into chunks to send."""
    return [data[start : start + _BYTES] for start in range(0, len(data), _BYTES)]


def response_size(outputs: Sequence[RequestOutput], params: SamplingParams) -> int:
    """Tokens of the prompts and samples, times the reported alternatives of each token."""
    tokens = sum(
        len(output.prompt_token_ids) * len(output.outputs)
        + sum(len(completion.token_ids) for completion in output.outputs)
        for output in outputs
    )
    return tokens * (1 + max(params.logprobs or 0, params.prompt_logprobs or 0))


def iter_json(value: Any) -> Iterator[str]:
    """Serialise a model or a dictionary in pieces of at most a few milliseconds each; its fields
    may hold models, dictionaries and sequences of them."""
    if isinstance(value, BaseModel | dict):
        separator = "{"
        is_dict = isinstance(value, dict)
        for name in value if is_dict else type(value).__pydantic_fields__:
            yield f"{separator}{json.dumps(name, ensure_ascii=False)}:"
            yield from iter_json(value[name] if is_dict else getattr(value, name))
            separator = ","
        yield "}" if separator == "," else "{}"
    elif isinstance(value, Sequence) and not isinstance(value, str) and value:
        # A model may be large and is serialised alone; other entries are small.
        for start in range(0, len(value), _ENTRIES):
            yield "," if start else "["
            entries = value[start : start + _ENTRIES]
            if isinstance(entries[0], BaseModel):
                for i, entry in enumerate(entries):
                    yield "," if i else ""
                    yield from iter_json(entry)
            else:
                yield _ENCODER.encode(entries)[1:-1]
        yield "]"
    else:
        yield _ENCODER.encode(value)


def _blocks(pieces: Iterator[str]) -> Iterator[bytes]:
    """Join pieces to chunks to send."""
    block: list[bytes] = []
    size = 0
    for piece in pieces:
        block.append(piece.encode())
        size += len(block[-1])
        if size >= _BYTES:
            yield b"".join(block)
            block, size = [], 0
    yield b"".join(block)
