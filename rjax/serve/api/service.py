"""The state that all routes share, created at server start."""

import asyncio
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

from fastapi import Request

from rjax.api.async_engine import AsyncLLMEngine, Health
from rjax.errors import ContextLengthError
from rjax.serve.api.sampling import Alternatives
from rjax.serve.api.structured_outputs import GrammarCache
from rjax.serve.api.trainers.weight_updates import WeightUpdates
from rjax.serve.config.limits import ServeLimits
from rjax.serve.config.serve_config import ServeConfig
from rjax.serve.http.auth import KeyRing
from rjax.serve.http.threads import WorkThreads
from rjax.serve.parsing.base import OutputFormat
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
    """One served model, with the state that all routes share.

    Attributes:
        engine: the engine, which runs on a thread or in a process of its own.
        tokenizer: the model's tokenizer.
        config: the server's configuration.
        created: start time of the server, seconds since 1970.
        max_model_len: most tokens of prompt and output.
        alternatives: alternatives per token that requests may ask for.
        keys: the tenants' API keys.
        unknown_fields: handles unknown fields of request bodies.
        tools: format of the model's tool calls; None if it is not known, or is harmony's.
        output_format: format by which outputs are parsed.
        grammars: checks constraints.
        zygote: the process that starts the workers; None if the service does not own it.
        texts: workers that render chat templates and tokenise.
        compilers: workers that compile grammars.
        threads: threads for bounded work on requests.
        response_threads: threads for bounded work on responses.
        large_bodies: semaphore that limits the parsing of large bodies to one at a time.
        prefixes: named prefixes of all tenants.
        responses: stored responses of all tenants.
        background: tasks of responses in the background.
        transfers: tasks that receive weights behind a route's answer.
        metrics: the server's metrics; see its type.
    """

    engine: AsyncLLMEngine
    tokenizer: Tokenizer
    config: ServeConfig
    created: int
    max_model_len: int
    alternatives: Alternatives
    keys: KeyRing
    unknown_fields: UnknownFields
    tools: ToolFormat | None
    output_format: OutputFormat
    grammars: GrammarCache
    zygote: Zygote | None
    texts: WorkerPool
    compilers: WorkerPool
    threads: WorkThreads
    response_threads: WorkThreads
    responses: ResponseStore
    metrics: Metrics
    prefixes: PrefixRegistry = dataclasses.field(default_factory=PrefixRegistry)
    background: "set[asyncio.Task[None]]" = dataclasses.field(default_factory=set)
    transfers: "set[asyncio.Task[None]]" = dataclasses.field(default_factory=set)
    large_bodies: asyncio.Semaphore = dataclasses.field(
        default_factory=lambda: asyncio.Semaphore(1)
    )

    @property
    def limits(self) -> ServeLimits:
        """The limits of requests."""
        return self.config.limits

    @property
    def model(self) -> str:
        """The model's name in responses."""
        return self.config.model

    @property
    def failed(self) -> bool:
        """Whether the engine stopped on an error."""
        return self.engine.failed

    @property
    def health(self) -> Health | Literal["workers_hung"]:
        """The engine's state; "workers_hung" if it is ready and no worker can answer."""
        status = self.engine.health
        if status == "ready" and (self.texts.is_hung or self.compilers.is_hung):
            return "workers_hung"
        return status

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
        if self.config.enable_weight_updates:
            await self.weight_updates.close()
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
    def weight_updates(self) -> WeightUpdates:
        """The updates of the weights over HTTP."""
        return WeightUpdates(self.engine.weights)

    @functools.cached_property
    def defaults(self) -> dict[str, Any]:
        """The checkpoint's default sampling values."""
        return dict(self.tokenizer.generation.sampling)

    @functools.cached_property
    def longest_text(self) -> int:
        """Upper bound on the characters of a prompt that fits, from the longest token."""
        longest = max(map(len, self.tokenizer.hf.get_vocab()), default=1)
        return self.max_model_len * longest

    def check_model(self, name: str | None) -> None:
        """Check that a request names the served model.

        Raises:
            ApiError: 404.
        """
        if name is not None and name not in (*self.config.names, self.config.folder):
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
