"""Messages between a front end and an engine process: a length of four bytes, then msgpack.

Token ids are lists of integers, which msgspec packs and unpacks faster than bytes become a list.
"""

import struct
from collections.abc import Iterator
from typing import Any

import msgspec

MAX_BYTES = 2**31 - 1
"""Size of the largest message."""

_LENGTH = struct.Struct(">I")


class MessageError(ValueError):
    """The other process sent something that is no message."""


class Start(msgspec.Struct, tag="start", array_like=True):
    """First message to the engine process.

    Attributes:
        factory: "module:function" that returns the engine.
        arguments: its keyword arguments, of plain values.
        prepare: "module:function" that gets the engine before it serves, while its progress is
            reported; None for none.
    """

    factory: str
    arguments: dict[str, Any]
    prepare: str | None = None


class Add(msgspec.Struct, tag="add", array_like=True):
    """Add a request.

    Attributes:
        call: number of the `Reply`.
        request_id: unique among unfinished requests.
        token_ids: the prompt.
        params: the sampling parameters' fields that differ from the defaults.
        options: further arguments of the engine's ``add_request``.
    """

    call: int
    request_id: str
    token_ids: list[int]
    params: dict[str, Any]
    options: dict[str, Any]


class Abort(msgspec.Struct, tag="abort", array_like=True):
    """End requests."""

    request_ids: list[str]


class Stop(msgspec.Struct, tag="stop", array_like=True):
    """End samples of a request, in whose text the front end found a stop string."""

    request_id: str
    samples: list[int]


class Call(msgspec.Struct, tag="call", array_like=True):
    """Call a method of `rjax.engine_channel.channel.UTILITIES`.

    Attributes:
        call: number of the `Reply`.
        name: name of the method.
        args, kwargs: its arguments, of plain values.
    """

    call: int
    name: str
    args: list[Any]
    kwargs: dict[str, Any]


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """The engine is built; ``facts`` are an `rjax.engine_channel.facts.EngineFacts`."""

    facts: dict[str, Any]


class Step(msgspec.Struct, tag="step", array_like=True):
    """Outputs of one step, or of several that the front end did not read in time, as
    `rjax.engine_channel.output_codec` packs them."""

    outputs: list[Any]


class Reply(msgspec.Struct, tag="reply", array_like=True):
    """The result of an `Add` or a `Call`, or its error as `rjax.engine_channel.error_codec` packs
    it."""

    call: int
    result: Any = None
    error: Any = None


class Beat(msgspec.Struct, tag="beat", array_like=True):
    """Sign of life of the process, four times a second.

    Attributes:
        heartbeat: time of ``time.monotonic`` at which the engine was last between two steps.
        progress: fields of a `rjax.batch.compile_progress.CompileProgress`; None before the engine
            is built.
        stats: the engine's statistics, if new ones were recorded.
    """

    heartbeat: float
    progress: Any = None
    stats: Any = None


class Failed(msgspec.Struct, tag="failed", array_like=True):
    """Last message of a process whose engine could not be built, or stopped on an error."""

    error: Any


type Command = Start | Add | Abort | Stop | Call
type Event = Ready | Step | Reply | Beat | Failed

_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(Start | Add | Abort | Stop | Call)
_events = msgspec.msgpack.Decoder(Ready | Step | Reply | Beat | Failed)


def frame(message: Command | Event) -> bytes:
    """A message with its length.

    Raises:
        TypeError: it holds a value that is not plain.
    """
    packed = _encoder.encode(message)
    return _LENGTH.pack(len(packed)) + packed


class MessageReader:
    """Splits a stream of bytes into messages."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    @classmethod
    def of_commands(cls) -> "MessageReader":
        """A reader for the engine process."""
        return cls(_commands)

    @classmethod
    def of_events(cls) -> "MessageReader":
        """A reader for the front end."""
        return cls(_events)

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that are complete with these bytes.

        Raises:
            MessageError: the bytes are no message.
        """
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_BYTES:
                raise MessageError(f"a message of {length} bytes; at most {MAX_BYTES} are read")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            packed = bytes(memoryview(self._buffer)[_LENGTH.size : end])
            del self._buffer[:end]
            try:
                message = self._decoder.decode(packed)
            except msgspec.MsgspecError as error:
                raise MessageError(f"a malformed message: {error}") from error
            yield message
