"""Configuration of the engine: frozen dataclasses, checked when made."""

import dataclasses
import difflib
import pathlib
from collections.abc import Mapping
from typing import Any, Literal, no_type_check

from rjax.errors import InvalidConfigError
from rjax.memory_sizes import GIB, host_memory, parse_size

type RelayMode = Literal["auto", "on", "off"]
type DType = Literal["auto", "float32", "bfloat16", "float16"]
type KVCacheDType = Literal["auto", "fp8", "fp8_e4m3"]

PAGE_SIZES = (8, 16, 32, 64, 128, 256)
"""Tokens that a page may have."""

_SWAP_GIB = 4
_SYS, _USR = "{__SYS_PROMPT}", "{__USR_PROMPT}"


def _positive(name: str, value: int | None, least: int = 1) -> None:
    if value is not None and (
        not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31
    ):
        raise InvalidConfigError(
            f"{name} is {value!r}; give a whole number from {least} to 2147483647"
        )


def _choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidConfigError(f"{name} is {value!r}; choose one of {', '.join(allowed)}")


@no_type_check  # what users give is checked by hand, with messages for them
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Which weights to serve and how to hold them.

    Attributes:
        model: a Hugging Face folder or hub id; None for the bundled model.
        tokenizer: folder or hub id of the tokenizer, a file tokenizer.json, or a tokenizer of
            ``transformers`` or ``tokenizers``; None for the model's own.
        dtype: of weights, and of KV unless ``kv_cache_dtype`` is another; "auto" is the
            checkpoint's on a GPU and float32 on a CPU.
        load_format: "auto" reads safetensors, "dummy" draws random weights from config.json alone.
        revision: branch, tag or commit on the hub, for every file of the model.
        hf_token: hub token; None uses the one the hub client finds.
        max_model_len: tokens of prompt and output together, in one sequence; None for the model's.
        seed: of dummy weights and of requests that bring no seed of their own.
        skip_tokenizer_init: serve token ids only; text prompts and stop strings are then refused.
        chat_template: Jinja source that replaces the tokenizer's own.
    """

    model: str | None = None
    tokenizer: Any = None
    dtype: DType = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    revision: str | None = None
    hf_token: str | None = None
    max_model_len: int | None = None
    seed: int = 0
    skip_tokenizer_init: bool = False
    chat_template: str | None = None

    def __post_init__(self) -> None:
        _choice("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        _choice("load_format", self.load_format, ("auto", "dummy"))
        _positive("max_model_len", self.max_model_len)
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise InvalidConfigError(
                f"seed is {self.seed!r}; give a whole number from 0 to 2**63-1"
            )


@no_type_check  # what users give is checked by hand, with messages for them
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """The paged KV pool.

    Attributes:
        page_size: tokens a page; a power of two from 8 to 256.
        gpu_memory_utilization: share of the device's memory for weights, KV and workspace together.
        num_pages: size of the pool; None profiles the memory that a largest step leaves.
        enable_prefix_caching: keep pages of finished sequences for later prompts.
        swap_space: host memory for the pages of preempted sequences: a number of GiB, or a text
            with a unit such as "512MiB"; None is 4 GiB, or half of the host's memory where that is
            less. Taken from the system as pages are used, page-locked. 0 computes them again
            always. On a GPU, XLA gives out 64 GiB of such memory unless
            XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB is set, which needs raising for more.
        preemption: "swap" to host memory while there is room, "recompute", or "auto": whichever a
            cost model finds cheaper. The tokens are the same.
        prefix_files: files of ``save_prefix`` to load at the start, under the names they hold.
        kv_cache_dtype: "auto" keeps KV in the dtype of the weights, "fp8" (or "fp8_e4m3") in
            float8_e4m3fn, a byte a number. Numbers keep three bits of mantissa; there is no
            calibration: all scales are 1, and what is beyond 448 is clipped to it.
    """

    page_size: int = 64
    gpu_memory_utilization: float = 0.92
    num_pages: int | None = None
    enable_prefix_caching: bool = True
    swap_space: float | str | None = None
    preemption: Literal["auto", "swap", "recompute"] = "auto"
    prefix_files: tuple[str, ...] = ()
    kv_cache_dtype: KVCacheDType = "auto"

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
        if self.swap_space is not None:
            parse_size("swap_space", self.swap_space)
        _choice("preemption", self.preemption, ("auto", "swap", "recompute"))
        _choice("kv_cache_dtype", self.kv_cache_dtype, ("auto", "fp8", "fp8_e4m3"))

    @property
    def swap_bytes(self) -> int:
        """``swap_space`` in bytes."""
        if self.swap_space is None:
            return min(_SWAP_GIB * GIB, host_memory() // 2)
        return parse_size("swap_space", self.swap_space)


@no_type_check  # what users give is checked by hand, with messages for them
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """How much runs in one step.

    Attributes:
        max_num_seqs: sequences that generate at once.
        max_num_prefill_ahead: further sequences whose prompts are computed in the spare rows of
            steps, so that one is ready when another ends. They hold pages and are preempted first.
            None is ``max_num_seqs`` where such rows cost little (on Hopper a step of up to 128 rows
            waits for the weights), and else 0.
        max_num_batched_tokens: token budget of a step; decodes first, prompt chunks fill the rest.
            Prefill ahead fills no more than those rows. None is 2048 on a GPU and 512 on a CPU.
        num_decode_steps: decode steps that start as one program on the device. More than 1 spares
            the host work where a step is shorter than what the host does for it (small models,
            few sequences); tokens then come so many at a time, and new requests wait so long. The
            tokens are the same.
        max_logprobs: most alternatives a request may ask for at each position.
        priority_patience: a request of priority p goes before the requests of priority p + 1 among
            the next so many arrivals, and not before later ones: none waits for ever.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    max_num_prefill_ahead: int | None = None
    num_decode_steps: int = 1
    max_logprobs: int = 20
    priority_patience: int = 1024

    def __post_init__(self) -> None:
        _positive("max_num_seqs", self.max_num_seqs)
        _positive("max_num_batched_tokens", self.max_num_batched_tokens)
        _positive("num_decode_steps", self.num_decode_steps)
        _positive("max_num_prefill_ahead", self.max_num_prefill_ahead, least=0)
        _positive("max_logprobs", self.max_logprobs)
        _positive("priority_patience", self.priority_patience)
        if (
            self.max_num_batched_tokens is not None
            and self.max_num_batched_tokens < self.max_num_seqs
        ):
            raise InvalidConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs "
                f"({self.max_num_seqs}); every running sequence needs a token a step: raise the "
                "first or lower the second"
            )


@no_type_check  # what users give is checked by hand, with messages for them
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RelaySettings:
    """Reading a shared beginning once (RelayAttention).

    Attributes:
        enable_relay_attention: "on" reads every shared run of pages once, "off" never, and the two
            give the same attention bit for bit; "auto" shares where the cost model says it pays,
            and on Hopper reads long runs in longer pieces, which is faster and equal within
            rounding. True and False are taken for "on" and "off".
        sys_prompt: text put before every text prompt, its KV computed once and kept.
        sys_schema: template with ``{__SYS_PROMPT}`` and, after it, ``{__USR_PROMPT}``; it lays out
            system prompt and user text. Default: the one directly after the other.
        sys_prompt_file, sys_schema_file: the same from UTF-8 files; they win over the strings.
        relay_split_tokens: attention is cut at multiples of so many tokens of a sequence, and only
            whole cuts are shared; a multiple of the page size. None is the backend's best. Only
            "auto" on Hopper can join cuts; elsewhere a sequence of ``max_model_len`` has 32 at
            most, so that beyond 32 times as many tokens cuts are longer multiples.
    """

    enable_relay_attention: RelayMode | bool = "auto"
    sys_prompt: str | None = None
    sys_schema: str = _SYS + _USR
    sys_prompt_file: str | None = None
    sys_schema_file: str | None = None
    relay_split_tokens: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.enable_relay_attention, bool):
            mode = "on" if self.enable_relay_attention else "off"
            object.__setattr__(self, "enable_relay_attention", mode)
        _choice("enable_relay_attention", self.enable_relay_attention, ("auto", "on", "off"))
        _positive("relay_split_tokens", self.relay_split_tokens)
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


@no_type_check  # what users give is checked by hand, with messages for them
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything an engine is made from.

    Attributes:
        backend: attention backend; "auto" picks the best for the device at start and reports it.
        tensor_parallel_size: devices on the mesh axis ``tensor``.
        use_tqdm: progress bars for loading and compiling.
        warmup: compile every step size at the start, not when it is first needed.
        check_values: check each step's page tables, positions and attention plan against each other
            on the host before it runs, and raise ValueError where they do not fit; slow, for the
            search of faults.
        compilation_cache_dir: folder for compiled steps, kept between runs; None keeps none. Where
            the process has set JAX's own ``jax_compilation_cache_dir``, that one is used.
    """

    model: ModelSettings = ModelSettings()
    cache: CacheSettings = CacheSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    relay: RelaySettings = RelaySettings()
    backend: str = "auto"
    tensor_parallel_size: int = 1
    use_tqdm: bool = True
    warmup: bool = False
    check_values: bool = False
    compilation_cache_dir: str | None = "~/.cache/rjax/compiled"

    def __post_init__(self) -> None:
        _positive("tensor_parallel_size", self.tensor_parallel_size)
        split, page = self.relay.relay_split_tokens, self.cache.page_size
        if split is not None and split % page:
            raise InvalidConfigError(
                f"relay_split_tokens is {split}; it must be a multiple of page_size ({page})"
            )

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> "EngineConfig":
        """Build from flat keyword options, as ``LLM(model, **options)`` takes them.

        Raises:
            InvalidConfigError: a bad value, or an unknown key (the message names the nearest).
        """
        groups = {
            "model": ModelSettings,
            "cache": CacheSettings,
            "scheduler": SchedulerSettings,
            "relay": RelaySettings,
        }
        owner = {f.name: group for group, kind in groups.items() for f in dataclasses.fields(kind)}
        top = {f.name for f in dataclasses.fields(cls)} - groups.keys()
        split: dict[str, dict[str, Any]] = {group: {} for group in groups}
        own: dict[str, Any] = {}
        for key, value in options.items():
            if key in owner:
                split[owner[key]][key] = value
            elif key in top:
                own[key] = value
            else:
                near = difflib.get_close_matches(key, [*owner, *top], n=1, cutoff=0)
                raise InvalidConfigError(f"unknown option {key!r}; the nearest is {near[0]!r}")
        made = {group: kind(**split[group]) for group, kind in groups.items()}
        return cls(**made, **own)
