"""Builds a service from an engine with a tokenizer."""

import logging
import time

from rjax.api.async_engine import AsyncLLMEngine, QueueLimits
from rjax.config.memory_sizes import GIB
from rjax.engine.protocol import Engine
from rjax.engine_channel.channel import EngineChannel
from rjax.engine_channel.facts import EngineFacts
from rjax.engine_channel.thread_channel import ThreadChannel
from rjax.errors import InvalidConfigError
from rjax.serve.api.sampling import Alternatives
from rjax.serve.api.service import Service
from rjax.serve.api.structured_outputs import GrammarCache
from rjax.serve.config.limits import ServeLimits
from rjax.serve.config.serve_config import ServeConfig
from rjax.serve.http.auth import KeyRing
from rjax.serve.http.threads import WorkThreads
from rjax.serve.parsing.registry import HARMONY, choose_output_format
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
    config: ServeConfig,
    *,
    zygote: Zygote | None = None,
    close_zygote: bool = False,
) -> Service:
    """Create the service of an engine with a tokenizer.

    Args:
        engine: an `rjax.engine.llm_engine.LLMEngine`, which only the service may use afterwards;
            or a channel to one.
        config: the server's configuration.
        zygote: starts worker processes; None creates one, which the service closes.
        close_zygote: the service closes the given zygote too.

    Raises:
        InvalidConfigError: the tokenizer did not come from a folder, or a parser does not go with
            it.
    """
    limits = config.limits
    channel = engine if isinstance(engine, EngineChannel) else ThreadChannel(engine)
    facts, tokenizer = channel.facts, channel.tokenizer
    assert tokenizer is not None, "a server speaks text"
    keys = KeyRing(config.keys, config.operator_keys)
    if tokenizer.folder is None:
        raise InvalidConfigError(
            "the server's workers load the tokenizer from a folder, and this engine's did not come "
            "from one; save it with save_pretrained and give the folder"
        )
    template = tokenizer.hf.chat_template
    vocab_size = facts.vocab_size
    tools = choose_tool_format(config.tool_call_parser, tokenizer)
    if tools is None and config.reasoning_parser != HARMONY:
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
    key_share = limits.key_share if len(keys.tenants) > 1 else 1.0
    _check_queue(limits, key_share, facts.max_num_seqs)
    grammars = GrammarCache(tokenizer, vocab_size, limits, compilers)
    channel.call_utility_sync(
        "limit_grammar_cache",
        limits.grammar_cache,
        limits.grammar_cache_bytes,
        limits.grammar_bytes,
        limits.grammar_idle_seconds,
    )
    return Service(
        engine=AsyncLLMEngine(
            channel,
            QueueLimits(
                sequences=limits.queued_sequences,
                prompt_tokens=limits.queued_tokens,
                tenant_share=key_share,
                heartbeat_seconds=limits.heartbeat_seconds,
                unread_tokens=limits.unread_tokens,
            ),
        ),
        tokenizer=tokenizer,
        config=config,
        created=int(time.time()) if config.created is None else config.created,
        max_model_len=facts.max_model_len,
        alternatives=Alternatives(min(facts.max_logprobs, vocab_size), vocab_size),
        unknown_fields=UnknownFields(strict=config.strict_fields),
        keys=keys,
        metrics=Metrics(config.model, _cache_figures(facts)),
        grammars=grammars,
        zygote=zygote if close_zygote else None,
        texts=texts,
        compilers=compilers,
        threads=WorkThreads(4),
        response_threads=WorkThreads(2),
        tools=tools,
        output_format=choose_output_format(
            config.reasoning_parser,
            tools,
            config.tool_call_parser,
            tokenizer,
            grammars.special_tokens,
        ),
        responses=ResponseStore(limits.responses, limits.responses_bytes),
    )


def _check_queue(limits: ServeLimits, key_share: float, max_num_seqs: int) -> None:
    if limits.queued_sequences < max_num_seqs:
        _log.warning(
            "the limit queued_sequences is %d, so the batch never has max_num_seqs = %d sequences: "
            "raise the first or lower the second",
            limits.queued_sequences,
            max_num_seqs,
        )
    elif limits.queued_sequences * key_share < max_num_seqs:
        _log.warning(
            "the limits queued_sequences and key_share are %d and %g, so one API key alone never "
            "fills the batch of max_num_seqs = %d sequences: raise one of them or lower the last",
            limits.queued_sequences,
            key_share,
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
