"""The server's limits, in one table."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from rjax.config.sampling_limits import LIMITS
from rjax.errors import InvalidConfigError, near_miss


def _limit(default: Any, meaning: str, most: float = 2**40) -> Any:
    return dataclasses.field(default=default, metadata={"meaning": meaning, "most": most})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServeLimits:
    """Upper limits on the resources of one request or of all requests.

    Each is checked before anything is allocated for a request. ``limits_table`` prints them with
    their meaning. `rjax.sampling` has the limits of sampling parameters.

    Raises:
        InvalidConfigError: a limit is not a finite number above zero, or is too large.
    """

    n: int = _limit(64, "samples of one prompt, generated or returned")
    prompts: int = _limit(128, "prompts of one completion request")
    sequences: int = _limit(256, "prompts times samples of one request")
    messages: int = _limit(1024, "messages of one chat request, input items of one response")
    parts: int = _limit(4096, "text parts and tool calls of one chat request or input")
    stop_strings: int = _limit(LIMITS.stop_strings, "stop strings")
    bad_words: int = _limit(LIMITS.bad_words, "bad words")
    logit_bias: int = _limit(LIMITS.logit_bias, "tokens with a bias")
    request_logprobs: int = _limit(
        524_288,
        "logprobs of a request: tokens times alternatives; without max_tokens an answer ends there",
    )
    token_ids: int = _limit(262_144, "entries of a list of token ids other than a prompt")
    tools: int = _limit(128, "functions of one chat request")
    name_chars: int = _limit(128, "characters in a name or a cache salt")
    body_bytes: int = _limit(16 * 2**20, "bytes of a request body")
    header_bytes: int = _limit(64 * 2**10, "bytes of a request's headers")
    headers: int = _limit(100, "headers of a request")
    body_values: int = _limit(262_144, "JSON values of a request body, including token ids")
    bodies_bytes: int = _limit(
        256 * 2**20, "bytes of the bodies of all active requests; more is a 503"
    )
    body_seconds: float = _limit(30.0, "seconds for a request body to arrive")
    schema_depth: int = _limit(32, "nesting of a JSON schema")
    schema_bytes: int = _limit(64 * 2**10, "bytes of a JSON schema, regex, grammar or choice list")
    choices: int = _limit(4096, "alternatives of a choice")
    grammar_seconds: float = _limit(5.0, "seconds to compile a regex, schema or grammar")
    grammar_cache: int = _limit(128, "cached compiled grammars")
    grammar_cache_bytes: int = _limit(256 * 2**20, "bytes of cached compiled grammars")
    grammar_bytes: int = _limit(
        2 * 2**30, "bytes of cached grammars and those in use; then the largest ones end"
    )
    grammar_idle_seconds: float = _limit(300.0, "seconds that an unused grammar stays cached")
    mask_seconds: float = _limit(1.0, "seconds of a request's masks, in addition to 1 ms per token")
    one_mask_seconds: float = _limit(0.25, "seconds of one mask; then its request ends")
    key_mask_seconds: float = _limit(
        2.0, "seconds of masks over 10 ms of one API key in a minute; then new grammars are a 503"
    )
    template_seconds: float = _limit(10.0, "seconds to render and tokenise a prompt")
    text_workers: int = _limit(8, "processes that render and tokenise prompts")
    grammar_workers: int = _limit(2, "processes that compile grammars")
    slow_tasks: int = _limit(4, "texts, and grammars, that run over 1 second; more is a 503")
    queued_texts: int = _limit(1024, "waiting texts and grammars of one API key; more is a 503")
    worker_bytes: int = _limit(2**30, "bytes of memory to render, tokenise or compile one request")
    request_seconds: float = _limit(
        3600.0, "seconds of a request in the engine; then it is aborted"
    )
    queued_sequences: int = _limit(1024, "unfinished sequences; more is a 503")
    queued_tokens: int = _limit(4_194_304, "prompt tokens of unfinished requests; more is a 503")
    key_share: float = _limit(
        0.5,
        "fraction of the queue left by other API keys that one key may fill; more is a 503; 1 "
        "keeps no room for another key",
        most=1,
    )
    retry_after: int = _limit(2, "Retry-After of a 503 in seconds")
    prefixes: int = _limit(64, "named prefixes of one API key")
    responses: int = _limit(1024, "stored responses of one API key; the oldest are evicted")
    responses_bytes: int = _limit(
        64 * 2**20, "bytes of one API key's stored responses, with inputs and conversations"
    )
    unread_tokens: int = _limit(
        262_144, "unread tokens and alternatives of one client; then its request is aborted"
    )
    send_seconds: float = _limit(30.0, "seconds for a client to read 16 KiB of buffered bytes")
    connections: int = _limit(2048, "concurrent requests; more is a 503")
    open_connections: int = _limit(4096, "connections, including silent and idle ones")
    address_connections: int = _limit(1024, "connections of one address (IPv6: of one /64)")
    health_connections: int = _limit(16, "further connections, only for health checks")
    header_seconds: float = _limit(10.0, "seconds for the headers of a request to arrive")
    keep_alive_seconds: int = _limit(30, "seconds that an idle connection stays open")
    heartbeat_seconds: float = _limit(
        120.0, "seconds of one step, unless it compiles, before /health is a 503"
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            whole, most = isinstance(field.default, int), field.metadata["most"]
            kinds = int if whole else int | float
            if (
                isinstance(value, bool)
                or not isinstance(value, kinds)
                or not math.isfinite(value)
                or not 0 < value <= most
            ):
                kind = "whole number" if whole else "number"
                raise InvalidConfigError(
                    f"the limit {field.name} is {value!r}; give a {kind} above 0, at most {most} ("
                    f"{field.metadata['meaning']}; the default is {field.default})"
                )

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> "ServeLimits":
        """Build from the texts of ``--limit NAME=VALUE``.

        Raises:
            InvalidConfigError: a name is unknown (the message suggests the nearest) or a value is
                not a number.
        """
        fields = {field.name: field for field in dataclasses.fields(cls)}
        given: dict[str, Any] = {}
        for name, text in options.items():
            if name not in fields:
                raise InvalidConfigError(f"unknown limit {name!r}; {near_miss(name, fields)}")
            try:
                given[name] = type(fields[name].default)(text)
            except ValueError as error:
                raise InvalidConfigError(
                    f"the limit {name} is {text!r}; give a number such as {fields[name].default}"
                ) from error
        return cls(**given)


def limits_table(limits: ServeLimits) -> str:
    """The limits as a Markdown table: name, value, what it bounds."""
    rows = [
        f"| {field.name} | {getattr(limits, field.name):,} | {field.metadata['meaning']} |"
        for field in dataclasses.fields(limits)
    ]
    return "\n".join(["| limit | value | bounds |", "| --- | --- | --- |", *rows])
