"""The state that all routes share, created at server start."""

import asyncio
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from fastapi import Request

from rjax.async_engine import AsyncLLMEngine
from rjax.errors import ContextLengthError
from rjax.serve.api.sampling import Alternatives
from rjax.serve.api.structured_outputs import GrammarCache
from rjax.serve.config.http_options import HttpOptions
from rjax.serve.config.limits import ServeLimits
from rjax.serve.http.auth import KeyRing
from rjax.serve.http.threads import WorkThreads
from rjax.serve.parsing import OutputFormat
from rjax.serve.parsing.tools.base import ToolFormat
from rjax.serve.protocol.errors import CONTEXT_LENGTH_EXCEEDED, ApiError
from rjax.serve.protocol.fields import UnknownFields
from rjax.serve.stores.prefix_registry import PrefixRegistry
from rjax.serve.stores.response_store import ResponseStore
from rjax.serve.telemetry.metrics import Metrics
from rjax.serve.telemetry.throughput_log import log_throughput
from rjax.serve.workers.pool import WorkerPool
from rjax.serve.workers.zygote import Zygote
from rjax.tokenization import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Service:
    """One served model.

    Attributes:
        engine: runs on its own thread.
        tokenizer: of the model.
        model: served model name, in requests and responses.
        aliases: other names of the model in requests.
        root: the model's own name.
        created: start time of the server, seconds since 1970.
        max_model_len: most tokens of prompt and output.
        prefixes: named prefixes of all tenants.
        zygote: of the workers, if the service owns it.
        texts: workers that render chat templates and tokenise.
        compilers: workers that compile grammars.
        unknown_fields: handles unknown fields of request bodies.
        alternatives: alternatives per token that requests may ask for.
        large_bodies: limits the parsing of large bodies to one at a time.
        threads: for bounded work on requests.
        response_threads: for bounded work on responses.
        tools: how the model writes tool calls; None if that is not known, or harmony's.
        output_format: how outputs are parsed.
        literal_json_schemas: do not close objects of JSON schemas, as in `generation_schema`.
        return_tokens_as_token_ids: default of the request field with this name.
        replica_tag: name of this replica among several, in the ids of stored responses.
        background: tasks of responses in the background.
        limits, keys, metrics, grammars, responses, http: see their types.
    """

    engine: AsyncLLMEngine
    tokenizer: Tokenizer
    model: str
    root: str
    created: int
    max_model_len: int
    alternatives: Alternatives
    unknown_fields: UnknownFields
    limits: ServeLimits
    keys: KeyRing
    metrics: Metrics
    grammars: GrammarCache
    zygote: Zygote | None
    texts: WorkerPool
    compilers: WorkerPool
    threads: WorkThreads
    response_threads: WorkThreads
    tools: ToolFormat | None
    output_format: OutputFormat
    responses: ResponseStore
    http: HttpOptions
    literal_json_schemas: bool = False
    return_tokens_as_token_ids: bool = False
    replica_tag: str = ""
    aliases: tuple[str, ...] = ()
    prefixes: PrefixRegistry = dataclasses.field(default_factory=PrefixRegistry)
    background: "set[asyncio.Task[None]]" = dataclasses.field(default_factory=set)
    large_bodies: asyncio.Semaphore = dataclasses.field(
        default_factory=lambda: asyncio.Semaphore(1)
    )

    @property
    def failed(self) -> bool:
        """Whether the engine stopped on an error."""
        return self.engine.failed

    @property
    def num_live(self) -> int:
        """Number of unfinished requests in the engine."""
        return self.engine.num_live

    async def start(self) -> None:
        """Start the engine's thread and the workers that render and tokenise."""
        await self.engine.start()
        await self.texts.start()

    async def log_throughput(self, interval: float) -> None:
        """See `rjax.serve.telemetry.throughput_log.log_throughput`."""
        await log_throughput(self.engine, interval)

    async def drain(self, seconds: float) -> bool:
        """See `AsyncLLMEngine.drain`."""
        return await self.engine.drain(seconds)

    async def stop(self) -> None:
        """See `AsyncLLMEngine.stop`. Responses in the background end too."""
        await self.engine.stop()
        for task in self.background:
            task.cancel()
        await asyncio.gather(*self.background, return_exceptions=True)

    def close(self) -> None:
        """End the worker processes and threads."""
        self.texts.close()
        self.compilers.close()
        if self.zygote is not None:
            self.zygote.close()
        self.threads.close()
        self.response_threads.close()

    @functools.cached_property
    def defaults(self) -> dict[str, Any]:
        """The checkpoint's default sampling values."""
        return dict(self.tokenizer.generation.sampling)

    @functools.cached_property
    def longest_text(self) -> int:
        """Upper bound on the characters of a prompt that fits, from the longest token."""
        longest = max(map(len, self.tokenizer.hf.get_vocab()), default=1)
        return self.max_model_len * longest

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the model in requests."""
        return self.model, *self.aliases

    def check_model(self, name: str | None) -> None:
        """Check that a request names the served model.

        Raises:
            ApiError: 404.
        """
        if name is not None and name not in self.names:
            raise ApiError(
                404,
                f"no model {name[:100]!r} here; the one served is {self.model!r}",
                code="model_not_found",
                param="model",
            )

    def check_text(self, text: str, param: str) -> None:
        """Refuse, before tokenising, a text that is too long for any prompt.

        Raises:
            ApiError: 400.
        """
        if len(text) > self.longest_text:
            error = ContextLengthError.of_characters(param, len(text), self.max_model_len)
            raise ApiError(400, str(error), code=CONTEXT_LENGTH_EXCEEDED, param=param)

    def check_prompts(self, lengths: Sequence[int], param: str) -> None:
        """Refuse prompts with more tokens than leave room for an output token.

        Args:
            lengths: tokens of each prompt.
            param: request field of the prompts, for messages.

        Raises:
            ApiError: 400.
        """
        if (most := max(lengths, default=0)) >= self.max_model_len:
            error = ContextLengthError.of_tokens(most, self.max_model_len)
            raise ApiError(400, str(error), code=CONTEXT_LENGTH_EXCEEDED, param=param)


async def get_service(request: Request) -> Service:
    """The service of the request's app. It is a coroutine because FastAPI runs plain functions on
    threads."""
    return request.app.state.service
