"""The facts that a front end knows of its engine, as plain values."""

import dataclasses
from typing import Any

from rjax.tokenization import Tokenizer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSource:
    """The files from which a tokenizer was loaded, to load an equal one.

    Attributes:
        path: folder or tokenizer.json file; None if it was made from an object.
        model_folder: folder of the generation config; None without one.
        chat_template: the template in use; None if it has none or several.
    """

    path: str | None
    model_folder: str | None
    chat_template: str | None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "TokenizerSource":
        """The source of a tokenizer."""
        template, folder = tokenizer.hf.chat_template, tokenizer.model_folder
        return cls(
            path=tokenizer.source,
            model_folder=None if folder is None else str(folder),
            chat_template=template if isinstance(template, str) else None,
        )

    def load(self) -> Tokenizer:
        """A tokenizer that is equal to the engine's."""
        return Tokenizer(
            self.path, chat_template=self.chat_template, model_folder=self.model_folder
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """Sizes and settings of an engine; they do not change.

    Attributes:
        description: the engine's ``repr``.
        summary: model, dtype, sizes and kernels, by name.
        dtype: of the weights and activations.
        vocab_size: width of the logits.
        max_model_len: most tokens of a sequence.
        max_logprobs: most alternatives that a request may ask for.
        logprobs_mode: of requests that set none.
        max_num_seqs: most sequences that decode at the same time.
        page_size: tokens per page.
        num_pages: number of pages of the KV pool.
        kv_cache_dtype, enable_prefix_caching, gpu_memory_utilization: the options of
            `rjax.config.CacheSettings`.
        swap_bytes: host memory for swapped KV.
        tokenizer: source of the tokenizer; None where the engine serves token ids only.
    """

    description: str
    summary: dict[str, str]
    dtype: str
    vocab_size: int
    max_model_len: int
    max_logprobs: int
    logprobs_mode: str
    max_num_seqs: int
    page_size: int
    num_pages: int
    kv_cache_dtype: str
    enable_prefix_caching: bool
    gpu_memory_utilization: float
    swap_bytes: int
    tokenizer: TokenizerSource | None


def facts_of(engine: Any) -> EngineFacts:
    """The facts of an `rjax.engine.llm_engine.LLMEngine`."""
    config, stats = engine.config, engine.stats()
    tokenizer = engine.tokenizer
    return EngineFacts(
        description=repr(engine),
        summary=dict(engine.summary),
        dtype=engine.summary["dtype"].partition(",")[0],  # then that of KV, if it differs
        vocab_size=engine.model_config.vocab_size,
        max_model_len=engine.max_model_len,
        max_logprobs=config.scheduler.max_logprobs,
        logprobs_mode=config.scheduler.logprobs_mode,
        max_num_seqs=stats.max_num_seqs,
        page_size=config.cache.page_size,
        num_pages=stats.kv_bytes_total // stats.page_bytes,
        kv_cache_dtype=config.cache.kv_cache_dtype,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        gpu_memory_utilization=config.cache.gpu_memory_utilization,
        swap_bytes=config.cache.swap_bytes,
        tokenizer=None if tokenizer is None else TokenizerSource.of(tokenizer),
    )
