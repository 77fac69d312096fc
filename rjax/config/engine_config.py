"""Options of the engine: frozen dataclasses, checked when made.

The "Attributes" sections are the only documentation of the options: `rjax.config.option_docs` puts
it into the docstring of `rjax.LLM` and into ``--help`` of the commands.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any, Literal, no_type_check

from rjax.config.kv_events import KvEventsConfig, kv_events_config
from rjax.config.logprobs_mode import LogprobsMode, check_logprobs_mode
from rjax.config.memory_sizes import GIB, host_memory, parse_size
from rjax.errors import InvalidConfigError, near_miss
from rjax.vllm.options import own_options

type RelayMode = Literal["auto", "on", "off"]
type DType = Literal["auto", "float32", "bfloat16", "float16"]
type Warmup = Literal["off", "background", "on", "auto"]
type KVCacheDType = Literal["auto", "fp8", "fp8_e4m3"]
type AutoInt = Literal["auto"] | int

PAGE_SIZES = (8, 16, 32, 64, 128, 256)
"""Allowed numbers of tokens per page."""

_MOST = 2**31 - 1
_SWAP_GIB = 4
_SYS, _USR = "{__SYS_PROMPT}", "{__USR_PROMPT}"


def _is_whole(value: object, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= _MOST


def _positive(name: str, value: int | None, least: int = 1) -> None:
    if value is not None and not _is_whole(value, least):
        raise InvalidConfigError(
            f"{name} is {value!r}; give a whole number from {least} to {_MOST}"
        )


def _positive_or_auto(name: str, value: object, least: int = 1) -> None:
    if value != "auto" and not _is_whole(value, least):
        raise InvalidConfigError(
            f"{name} is {value!r}; give a whole number from {least} to {_MOST}, or auto"
        )


def _choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidConfigError(f"{name} is {value!r}; choose one of {', '.join(allowed)}")


@no_type_check  # user input is checked by hand, with readable messages
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Which model to load, and how.

    Attributes:
        model: Hugging Face folder or hub id; by default the bundled model.
        tokenizer: folder or hub id of the tokenizer, a file tokenizer.json, or a tokenizer object
            of ``transformers`` or ``tokenizers``; by default the model's own.
        dtype: dtype of the weights, and of the KV unless ``kv_cache_dtype`` is set; "auto" is the
            checkpoint's dtype on a GPU and float32 on a CPU.
        load_format: "auto" reads safetensors; "dummy" draws random weights and needs only
            config.json.
        quantization: "fp8", "int8" and "int4" (groups of 128) quantise the weights of an
            unquantised model while it is loaded, rounding to nearest; "mxfp4" those of its experts.
            Quantised checkpoints (awq, gptq, fp8, mxfp4, compressed-tensors) are recognised without
            it.
        dequantize: hold quantised weights in ``dtype``: those of a quantised checkpoint are
            dequantised while they are loaded, and ``quantization`` leaves others as they are. "on"
            does so always, "off" never. "auto" does so on Hopper where kernels gain nothing from
            few bits and the memory is small: if the largest projection has fewer than 16 million
            weights, and all weights take less than 5 % of the device's memory.
        revision: branch, tag or commit on the hub, for every file of the model.
        hf_token: hub token; by default the one that the hub client finds.
        max_model_len: maximum tokens of one sequence, prompt and output together; by default
            the model's own limit.
        seed: seed of dummy weights and of requests without a seed of their own; the same seed gives
            the same tokens.
        skip_tokenizer_init: serve token ids only; text prompts and stop strings are refused.
        chat_template: Jinja source that replaces the tokenizer's chat template.
    """

    model: str | None = None
    tokenizer: Any = None
    dtype: DType = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    quantization: str | None = None
    dequantize: Literal["auto", "on", "off"] = "auto"
    revision: str | None = None
    hf_token: str | None = dataclasses.field(default=None, repr=False)
    max_model_len: int | None = None
    seed: int = 0
    skip_tokenizer_init: bool = False
    chat_template: str | None = None

    def __post_init__(self) -> None:
        _choice("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        _choice("load_format", self.load_format, ("auto", "dummy"))
        if not isinstance(self.quantization, str | None):
            raise InvalidConfigError(f"quantization is {self.quantization!r}; give a name, or None")
        _choice("dequantize", self.dequantize, ("auto", "on", "off"))
        _positive("max_model_len", self.max_model_len)
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise InvalidConfigError(
                f"seed is {self.seed!r}; give a whole number from 0 to 2**63-1"
            )


@no_type_check  # user input is checked by hand, with readable messages
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """The paged KV pool.

    Attributes:
        page_size: tokens per page: 8, 16, 32, 64, 128 or 256.
        gpu_memory_utilization: fraction of the device's memory for weights, KV and workspace.
        num_pages: pages in the KV pool; by default as many as fit into the memory that the largest
            step leaves. If a model has layers with and without sliding windows, a page holds the KV
            of a group of layers, and a sequence takes pages for each group.
        num_states: states of a model with linear attention, such as Qwen3.5; each has what all such
            layers know at the end of a page. A running sequence holds one, or two for a step; the
            others are snapshots for prompts with the same prefix. By default they take half of the
            memory for KV at most.
        enable_prefix_caching: keep the KV of finished requests for prompts with the same prefix.
        swap_space: page-locked host memory for the KV of preempted sequences: a number of GiB, or a
            text with a unit such as "512MiB"; 0 never swaps. The default is 4 GiB, or half of the
            host's memory if that is less. Half of it at most is for states of linear attention. The
            memory is allocated as it is used. On a GPU, XLA allocates at most 64 GiB unless
            XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB is set.
        preemption: what happens to the KV of a preempted sequence: "swap" copies it to host memory
            while there is space, "recompute" computes it again, "auto" takes the cheaper one by a
            cost model. The tokens are the same.
        prefix_files: files written by ``save_prefix``, loaded at the start under the names in them.
        kv_cache_dtype: "auto" is the dtype of the weights. "fp8" and "fp8_e4m3" store KV as
            float8_e4m3fn, one byte per element, with the scales of a checkpoint that has some; else
            without calibration: the scales are 1, and values beyond 448 are clipped.
        kv_events_config: publish what the prefix cache stores and removes, for routers outside the
            engine: a mapping or JSON with vLLM's names, such as
            {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}; see
            `rjax.config.kv_events`. Needs rjax[kv-events].
    """

    page_size: int = 64
    gpu_memory_utilization: float = 0.92
    num_pages: int | None = None
    num_states: int | None = None
    enable_prefix_caching: bool = True
    swap_space: float | str | None = None
    preemption: Literal["auto", "swap", "recompute"] = "auto"
    prefix_files: tuple[str, ...] = ()
    kv_cache_dtype: KVCacheDType = "auto"
    kv_events_config: KvEventsConfig | Mapping[str, Any] | str | None = None

    def __post_init__(self) -> None:
        if self.page_size not in PAGE_SIZES:
            raise InvalidConfigError(
                f"page_size is {self.page_size!r}; choose one of "
                f"{', '.join(map(str, PAGE_SIZES))} tokens"
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise InvalidConfigError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization!r}; give a share above 0 "
                "and up to 1"
            )
        _positive("num_pages", self.num_pages)
        if self.num_states is not None and self.num_states < 2:
            raise InvalidConfigError(
                f"num_states is {self.num_states}; a sequence needs 2 while it computes: raise it"
            )
        if self.swap_space is not None:
            parse_size("swap_space", self.swap_space)
        _choice("preemption", self.preemption, ("auto", "swap", "recompute"))
        _choice("kv_cache_dtype", self.kv_cache_dtype, ("auto", "fp8", "fp8_e4m3"))
        events = kv_events_config(self.kv_events_config)
        if events is not None and events.published and not self.enable_prefix_caching:
            raise InvalidConfigError(
                "kv_events_config publishes events of the prefix cache, which is off; turn it on, "
                "or leave the events out"
            )
        object.__setattr__(self, "kv_events_config", events)

    @property
    def swap_bytes(self) -> int:
        """``swap_space`` in bytes."""
        if self.swap_space is None:
            return min(_SWAP_GIB * GIB, host_memory() // 2)
        return parse_size("swap_space", self.swap_space)


@no_type_check  # user input is checked by hand, with readable messages
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """The batch size and the token budget of a step.

    Attributes:
        max_num_seqs: maximum sequences that decode at the same time. "auto" is 64 on a CPU; on a
            GPU it is the largest of 256, 128, 64, 32 and 16 for which the KV pool holds 256 tokens
            of each sequence. It is at most ``max_num_batched_tokens``.
        max_num_batched_tokens: token budget of a step: decodes first, prompt chunks use the rest.
            The default is 2048 on a GPU and 512 on a CPU.
        max_num_prefill_ahead: maximum waiting sequences whose prompts are computed while
            ``max_num_seqs`` others decode; each starts to decode as soon as another sequence
            finishes. Their prompts fill the rows of a step that the others leave free, and they are
            preempted first. The default is 0, except on Hopper for ``max_num_seqs`` below 128
            (below 64 with fp8 weights): there it is ``max_num_seqs``, because a step of up to
            that many rows takes little longer than a step of few.
        num_decode_steps: decode steps that start as one program on the device. More than 1 reduces
            the host's work per step, which helps small models and small batches; tokens then arrive
            in groups, and new requests wait for the group. The tokens are the same. "auto" is 4 for
            batch sizes whose measured times show that the host is slower than the device, while no
            request waits and as long as 4 steps take at most 10 ms; while one streams, only if
            tokens then come at least twice as fast. Otherwise, on a CPU and with ``warmup`` "off"
            it is 1.
        max_logprobs: maximum alternatives that a request may ask for at each position.
        logprobs_mode: log-probabilities of requests that do not set it: "raw_logprobs" are those of
            the model's logits, "processed_logprobs" those of the distribution that is sampled from.
            Those of prompts are always raw.
        priority_patience: a request of priority p runs before this many earlier requests of
            priority p + 1, so that no request waits forever.
    """

    max_num_seqs: AutoInt = "auto"
    max_num_batched_tokens: int | None = None
    max_num_prefill_ahead: int | None = None
    num_decode_steps: AutoInt = "auto"
    max_logprobs: int = 20
    logprobs_mode: LogprobsMode = "raw_logprobs"
    priority_patience: int = 1024

    def __post_init__(self) -> None:
        _positive_or_auto("max_num_seqs", self.max_num_seqs)
        _positive("max_num_batched_tokens", self.max_num_batched_tokens)
        _positive_or_auto("num_decode_steps", self.num_decode_steps)
        _positive("max_num_prefill_ahead", self.max_num_prefill_ahead, least=0)
        _positive("max_logprobs", self.max_logprobs)
        check_logprobs_mode(self.logprobs_mode, InvalidConfigError)
        _positive("priority_patience", self.priority_patience)
        if (
            self.max_num_batched_tokens is not None
            and self.max_num_seqs != "auto"
            and self.max_num_batched_tokens < self.max_num_seqs
        ):
            raise InvalidConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs "
                f"({self.max_num_seqs}); every running sequence needs a token a step: raise the "
                "first or lower the second"
            )


@no_type_check  # user input is checked by hand, with readable messages
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RelaySettings:
    """Shared prefixes and relay attention.

    Attributes:
        enable_relay_attention: read the KV of a shared prefix once per step (RelayAttention): "on"
            always, "off" never, "auto" where a cost model predicts a gain. "on" and "off" give the
            same bits; "auto" on Hopper merges KV splits of long prefixes, which is equal within
            rounding. True is "on" and False is "off".
        sys_prompt: system prompt in front of every text prompt; its KV is computed once and pinned.
            Prompts of token ids and chat messages do not get it.
        sys_schema: template that contains ``{__SYS_PROMPT}`` and, after it, ``{__USR_PROMPT}``; by
            default the user's text follows the system prompt directly.
        sys_prompt_file: UTF-8 file with the system prompt; it wins over ``sys_prompt``.
        sys_schema_file: UTF-8 file with the template; it wins over ``sys_schema``.
        kv_split_size: tokens per KV split, a multiple of ``page_size``; only whole splits are
            shared. The default is the best value for the backend. With "auto" on Hopper splits can
            be merged; elsewhere a sequence has at most 32, so that splits grow with
            ``max_model_len``.
    """

    enable_relay_attention: RelayMode | bool = "auto"
    sys_prompt: str | None = None
    sys_schema: str = _SYS + _USR
    sys_prompt_file: str | None = None
    sys_schema_file: str | None = None
    kv_split_size: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.enable_relay_attention, bool):
            mode = "on" if self.enable_relay_attention else "off"
            object.__setattr__(self, "enable_relay_attention", mode)
        _choice("enable_relay_attention", self.enable_relay_attention, ("auto", "on", "off"))
        _positive("kv_split_size", self.kv_split_size)
        for field in ("sys_prompt", "sys_schema"):
            path = getattr(self, field + "_file")
            if path is not None:
                try:
                    text = pathlib.Path(path).read_text(encoding="utf-8")
                except (OSError, UnicodeDecodeError) as error:
                    raise InvalidConfigError(f"{field}_file {path!r}: {error}") from error
                object.__setattr__(self, field, text)
        if (
            self.sys_schema.count(_SYS) != 1
            or self.sys_schema.count(_USR) != 1
            or self.sys_schema.index(_SYS) > self.sys_schema.index(_USR)
        ):
            raise InvalidConfigError(
                f"sys_schema is {self.sys_schema!r}; it must hold {_SYS} once and then {_USR} once"
            )

    @property
    def mode(self) -> RelayMode:
        """The relay mode with booleans resolved."""
        return self.enable_relay_attention  # type: ignore[return-value]


GROUPS = {
    "model": ModelSettings,
    "cache": CacheSettings,
    "scheduler": SchedulerSettings,
    "relay": RelaySettings,
}
"""The groups of options, by their attribute of `EngineConfig`."""


@no_type_check  # user input is checked by hand, with readable messages
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All options of an engine.

    Attributes:
        model, cache, scheduler, relay: groups of options.
        backend: "mosaic", "triton" or "xla": attention by that backend, and no kernels but its own
            and plain JAX; "auto" takes the best kernel of each operation.
        tensor_parallel_size: devices on the mesh axis ``tensor``, which share the query heads, the
            feed-forward width and the vocabulary. They must divide the first two. KV heads that
            they do not divide are copied.
        enable_expert_parallel: each of these devices holds whole experts of a mixture of experts,
            not a share of the width of every expert. They must divide the number of experts.
        use_tqdm: show progress bars while loading and compiling, on a terminal or in a notebook.
        warmup: when the step sizes are compiled: "on" before the first request, "background" while
            requests run (a larger size serves until the right one is compiled), "off" each at its
            first use; "auto" is "background" on a GPU and "off" on a CPU.
        check_values: check the page tables, positions and attention plan of every step on the host,
            and raise ValueError for an inconsistency; slow, for debugging.
        compilation_cache_dir: folder that keeps compiled programs between runs; None keeps none.
            Programs are code: a folder that belongs to another user, or that every user can write,
            is not used. JAX's own ``jax_compilation_cache_dir`` wins if it is set.
        compile_processes: processes that compile programs beside the engine, whose steps wait for a
            compiler in its own process. They need ``compilation_cache_dir``, end when everything is
            compiled, and meanwhile take memory of each GPU that the engine leaves free. 0 compiles
            in the engine's process; "auto" is one for every four cores, up to 3, on a GPU and none
            on a CPU.
    """

    model: ModelSettings = ModelSettings()
    cache: CacheSettings = CacheSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    relay: RelaySettings = RelaySettings()
    backend: str = "auto"
    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False
    use_tqdm: bool = True
    warmup: Warmup = "off"
    check_values: bool = False
    compilation_cache_dir: str | None = "~/.cache/rjax/compiled"
    compile_processes: AutoInt = "auto"

    def __post_init__(self) -> None:
        _positive("tensor_parallel_size", self.tensor_parallel_size)
        _choice("warmup", self.warmup, ("off", "background", "on", "auto"))
        _positive_or_auto("compile_processes", self.compile_processes, 0)
        split, page = self.relay.kv_split_size, self.cache.page_size
        if split is not None and split % page:
            raise InvalidConfigError(
                f"kv_split_size is {split}; it must be a multiple of page_size ({page})"
            )

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> "EngineConfig":
        """Build from flat keyword options, as ``LLM(model, **options)`` takes them.

        Options of vLLM without effect here give a warning each.

        Raises:
            InvalidConfigError: a bad value, an unknown key (the message names the nearest), or an
                option of vLLM that is not supported (the message says what takes its place).
        """
        owner = {f.name: group for group, kind in GROUPS.items() for f in dataclasses.fields(kind)}
        top = {f.name for f in dataclasses.fields(cls)} - GROUPS.keys()
        split: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
        own: dict[str, Any] = {}
        for key, value in own_options(options, {*owner, *top}).items():
            if key in owner:
                split[owner[key]][key] = value
            elif key in top:
                own[key] = value
            else:
                near = near_miss(key, [*owner, *top])
                raise InvalidConfigError(f"unknown option {key!r}; {near}")
        made = {group: kind(**split[group]) for group, kind in GROUPS.items()}
        return cls(**made, **own)

    def to_options(self) -> dict[str, Any]:
        """The flat options, of plain values, that `from_options` builds an equal config from.

        Raises:
            InvalidConfigError: the tokenizer is an object.
        """
        given = self.model.tokenizer
        if not isinstance(given, str | pathlib.Path | None):
            raise InvalidConfigError(
                f"the tokenizer is a {type(given).__name__}, which cannot be sent to another "
                "process; save it with save_pretrained and give the folder"
            )
        parts = [getattr(self, group) for group in GROUPS]
        fields = [(part, field) for part in parts for field in dataclasses.fields(part)]
        fields += [(self, field) for field in dataclasses.fields(self) if field.name not in GROUPS]
        values = {field.name: (getattr(part, field.name), field.default) for part, field in fields}
        options = {name: value for name, (value, default) in values.items() if value != default}
        for name in ("sys_prompt_file", "sys_schema_file"):  # the text is in the other option
            options.pop(name, None)
        for name in ("model", "tokenizer"):
            if isinstance(options.get(name), pathlib.Path):
                options[name] = str(options[name])
        if (events := kv_events_config(self.cache.kv_events_config)) is not None:
            options["kv_events_config"] = dataclasses.asdict(events)
        return options
