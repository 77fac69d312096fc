"""Builds a service from an engine with a tokenizer."""

import logging
import time

from rjax.async_engine import AsyncLLMEngine, QueueLimits
from rjax.engine.protocol import Engine
from rjax.engine_channel.channel import EngineChannel
from rjax.engine_channel.facts import EngineFacts
from rjax.engine_channel.thread_channel import ThreadChannel
from rjax.errors import InvalidConfigError
from rjax.memory_sizes import GIB
from rjax.serve.api.sampling import Alternatives
from rjax.serve.api.service import Service
from rjax.serve.api.structured_outputs import GrammarCache
from rjax.serve.config.http_options import HttpOptions
from rjax.serve.config.limits import ServeLimits
from rjax.serve.http.auth import KeyRing
from rjax.serve.http.threads import WorkThreads
from rjax.serve.parsing import choose_output_format
from rjax.serve.parsing.registry import HARMONY
from rjax.serve.parsing.tools.registry import TOOL_CALL_PARSERS, choose_tool_format
from rjax.serve.protocol.fields import UnknownFields
from rjax.serve.stores.response_store import ResponseStore
from rjax.serve.telemetry.metrics import Metrics
from rjax.serve.workers.pool import WorkerLimits, WorkerPool
from rjax.serve.workers.tasks import TextModel
from rjax.serve.workers.zygote import Zygote

_log = logging.getLogger("rjax.serve")


def make_service(
    engine: Engine | EngineChannel,
    *,
    model: str,
    aliases: tuple[str, ...] = (),
    root: str | None = None,
    keys: KeyRing | None = None,
    limits: ServeLimits | None = None,
    tool_format: str = "auto",
    strict_fields: bool = False,
    reasoning_parser: str | None = None,
    literal_json_schemas: bool = False,
    return_tokens_as_token_ids: bool = False,
    http: HttpOptions | None = None,
    created: int | None = None,
    replica_tag: str = "",
    zygote: Zygote | None = None,
    close_zygote: bool = False,
) -> Service:
    """Create the service of an engine with a tokenizer.

    Args:
        engine: an `rjax.engine.llm_engine.LLMEngine`, which only the service may use afterwards;
            or a channel to one.
        model: served model name.
        aliases: other names of the model in requests.
        root: the model's own name; the served name by default.
        keys: API keys; None needs no key.
        limits: of requests.
        tool_format: "auto", or a name of `rjax.serve.parsing.tools.registry.TOOL_CALL_PARSERS`.
        strict_fields: refuse unknown fields of requests; otherwise each name is logged once.
        reasoning_parser: a name of `rjax.serve.parsing.REASONING_PARSERS`; None leaves reasoning
            in the content.
        literal_json_schemas: do not close objects of JSON schemas without
            ``additionalProperties``.
        return_tokens_as_token_ids: default of the request field with this name.
        http: options for proxies and browsers.
        created: when the server started, in seconds since 1970; None is now.
        replica_tag: see `Service`.
        zygote: starts worker processes; None creates one, which the service closes.
        close_zygote: the service closes the given zygote too.
    """
    limits = limits or ServeLimits()
    channel = engine if isinstance(engine, EngineChannel) else ThreadChannel(engine)
    facts, tokenizer = channel.facts, channel.tokenizer
    assert tokenizer is not None, "a server speaks text"
    keys = keys or KeyRing([])
    if tokenizer.folder is None:
        raise InvalidConfigError(
            "the server's workers load the tokenizer from a folder, and this engine's did not come "
            "from one; save it with save_pretrained and give the folder"
        )
    template = tokenizer.hf.chat_template
    vocab_size = facts.vocab_size
    tools = choose_tool_format(tool_format, tokenizer)
    if tools is None and reasoning_parser != HARMONY:
        _log.warning(
            "the chat template describes tools in a format that is not known: tool calls stay "
            "text. Give --tool-call-parser if one of %s fits",
            ", ".join(TOOL_CALL_PARSERS),
        )
    text_model = TextModel(
        folder=str(tokenizer.folder),
        chat_template=template if isinstance(template, str) else None,
        vocab_size=vocab_size,
        eos_token_ids=sorted(tokenizer.eos_token_ids),
    )
    close_zygote = close_zygote or zygote is None
    zygote = zygote or Zygote()

    def workers(quick: int, seconds: float) -> WorkerPool:
        bounds = WorkerLimits(
            quick=quick,
            slow=limits.slow_tasks,
            queued=limits.queued_texts,
            wait_seconds=limits.template_seconds,
            task_seconds=seconds,
            task_bytes=limits.worker_bytes,
        )
        return WorkerPool(zygote, text_model, bounds, shared=len(keys.tenants) > 1)

    texts = workers(limits.text_workers, limits.template_seconds)
    compilers = workers(limits.grammar_workers, limits.grammar_seconds)
    _check_queue(limits, facts.max_num_seqs)
    grammars = GrammarCache(tokenizer, vocab_size, limits, compilers)
    channel.call_utility_sync(
        "limit_grammar_cache", limits.grammar_cache, limits.grammar_cache_bytes
    )
    return Service(
        engine=AsyncLLMEngine(
            channel,
            QueueLimits(
                sequences=limits.queued_sequences,
                prompt_tokens=limits.queued_tokens,
                heartbeat_seconds=limits.heartbeat_seconds,
                unread_tokens=limits.unread_tokens,
            ),
        ),
        tokenizer=tokenizer,
        model=model,
        aliases=aliases,
        root=root or model,
        created=int(time.time()) if created is None else created,
        max_model_len=facts.max_model_len,
        alternatives=Alternatives(min(facts.max_logprobs, vocab_size), vocab_size),
        unknown_fields=UnknownFields(strict=strict_fields),
        limits=limits,
        keys=keys,
        metrics=Metrics(model, _cache_figures(facts)),
        grammars=grammars,
        zygote=zygote if close_zygote else None,
        texts=texts,
        compilers=compilers,
        threads=WorkThreads(4),
        response_threads=WorkThreads(2),
        tools=tools,
        output_format=choose_output_format(
            reasoning_parser, tools, tool_format, tokenizer, grammars.special_tokens
        ),
        literal_json_schemas=literal_json_schemas,
        return_tokens_as_token_ids=return_tokens_as_token_ids,
        replica_tag=replica_tag,
        responses=ResponseStore(limits.responses, limits.responses_bytes),
        http=http or HttpOptions(),
    )


def _check_queue(limits: ServeLimits, max_num_seqs: int) -> None:
    if limits.queued_sequences < max_num_seqs:
        _log.warning(
            "the limit queued_sequences is %d, so the batch never has max_num_seqs = %d sequences: "
            "raise the first or lower the second",
            limits.queued_sequences,
            max_num_seqs,
        )


def _cache_figures(facts: EngineFacts) -> dict[str, object]:
    """Settings of the KV pool, with vLLM's names."""
    return {
        "block_size": facts.page_size,
        "num_gpu_blocks": facts.num_pages,
        "cache_dtype": facts.kv_cache_dtype,
        "enable_prefix_caching": facts.enable_prefix_caching,
        "gpu_memory_utilization": facts.gpu_memory_utilization,
        "swap_space": facts.swap_bytes / GIB,
    }
