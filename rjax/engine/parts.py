"""What an engine is put together from."""

import dataclasses
import pathlib
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from models import BUNDLED_MODEL, ModelConfig, config_from_folder, load_model, resolve_folder
from rjax.config import EngineConfig
from rjax.engine.page_hash import root_key
from rjax.engine.page_operations import PageOperation
from rjax.engine.schedule import ScheduledSequence
from rjax.engine.step_limits import StepLimits, step_limits
from rjax.errors import InvalidConfigError, InvalidRequestError
from rjax.sampling import LIMITS, SamplingParams, SlotRow
from rjax.tokenization import Tokenizer
from rjax.worker.backend import choose_backend
from rjax.worker.compilation_cache import keep_compiled
from rjax.worker.dtype import choose_dtype, choose_kv_dtype
from rjax.worker.kv_cache import PoolSize, check_weights_fit
from rjax.worker.readout import StepReadout
from rjax.worker.worker import DispatchedStep, Worker


class StepWorker(Protocol):
    """What the engine needs of a worker; `rjax.worker.worker.Worker` is the one with a device."""

    pool: PoolSize
    num_host_pages: int

    @property
    def kv_dtype(self) -> jnp.dtype:
        """Of the KV pool."""
        ...

    @property
    def page_shape(self) -> tuple[int, ...]:
        """Of one page as ``read_pages`` gives it: (pools, K, S, H)."""
        ...

    def fingerprint(self) -> str:
        """Names the model by its configuration and weights."""
        ...

    def warmup(self) -> None:
        """Compile every step ahead."""
        ...

    def measure_page_seconds(self) -> float:
        """Time to bring one page to the device or back."""
        ...

    def read_pages(self, pages: list[int]) -> np.ndarray:
        """The KV in these pages, [X, pools, K, S, H]."""
        ...

    def write_pages(self, pages: list[int], data: np.ndarray) -> None:
        """Put KV into these pages."""
        ...

    def admit(self, slot: int, row: SlotRow) -> None:
        """Fill one slot of the sampling state for a new sequence."""
        ...

    def move(self, operations: list[PageOperation]) -> None:
        """Start these copies of pages, in their order, before the next step."""
        ...

    def dispatch(
        self, batch: list[ScheduledSequence], tables: Int[np.ndarray, "slots pages"]
    ) -> DispatchedStep:
        """Start a step and return at once; row s of ``tables`` lists the pages of slot s."""
        ...

    def sample(self, step: DispatchedStep) -> DispatchedStep:
        """Go on with a step that is held, now that the masks of its sequences are known."""
        ...

    def read(self, step: DispatchedStep) -> StepReadout:
        """Wait for a step's result."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """The parts of an engine; tests and benchmarks put in their own worker.

    Attributes:
        config: as the caller gave it.
        worker: runs the steps.
        vocab_size: width of the logits.
        max_model_len: tokens of one sequence, at most.
        limits: of its steps.
        identity: first key of every chain of the prefix cache: model and dtypes.
        backend, device: names, for the statistics.
        tokenizer: None where the engine serves token ids only.
        model_config: None where there is no model.
    """

    config: EngineConfig
    worker: Any  # a StepWorker; a structural check at run time would call its properties
    vocab_size: int
    max_model_len: int
    limits: StepLimits
    identity: bytes
    backend: str = "none"
    device: str = "none"
    tokenizer: Tokenizer | None = None
    model_config: ModelConfig | None = None


def build_parts(config: EngineConfig) -> EngineParts:
    """Load the model and make the worker.

    Raises:
        InvalidConfigError: a setting that this model or machine cannot meet.
        OutOfMemoryError: weights or KV pool do not fit.
    """
    keep_compiled(config.compilation_cache_dir)
    settings = config.model
    folder = resolve_folder(settings.model or BUNDLED_MODEL, settings.revision, settings.hf_token)
    model_config = config_from_folder(folder)
    max_model_len = _model_length(settings.max_model_len, model_config)
    tokenizer = _load_tokenizer(config, folder)
    devices = jax.devices()
    if config.tensor_parallel_size > len(devices):
        raise InvalidConfigError(
            f"tensor_parallel_size is {config.tensor_parallel_size}; there are {len(devices)} "
            "devices"
        )
    mesh = jax.make_mesh(
        (config.tensor_parallel_size,),
        ("tensor",),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=devices[: config.tensor_parallel_size],
    )
    on_cpu = devices[0].platform == "cpu"
    dtype = choose_dtype(settings.dtype, model_config, devices[0].platform)
    kv_dtype = choose_kv_dtype(config.cache.kv_cache_dtype, dtype)
    capability = getattr(devices[0], "compute_capability", None)
    backend = choose_backend(
        config.backend,
        platform=devices[0].platform,
        compute_capability=None if capability is None else float(capability),
        model=model_config,
        dtype=dtype,
        page_size=config.cache.page_size,
        kv_dtype=kv_dtype,
        devices=mesh.size,
    )
    check_weights_fit(
        folder,
        growth=dtype.itemsize / jnp.dtype(model_config.dtype).itemsize,
        memory=devices[0].memory_stats(),
        num_devices=config.tensor_parallel_size,
        utilization=config.cache.gpu_memory_utilization,
    )
    loaded = load_model(
        folder,
        dtype=dtype,
        load_format=settings.load_format,
        mesh=mesh,
        seed=settings.seed,
        progress=config.use_tqdm,
    )
    limits = step_limits(
        config.scheduler,
        most_tokens=512 if on_cpu else 2048,
        spare_rows=backend.spare_rows,
    )
    return EngineParts(
        config=config,
        worker=Worker(
            loaded,
            config,
            backend=backend,
            kv_dtype=kv_dtype,
            mesh=mesh,
            max_model_len=max_model_len,
            limits=limits,
            growth=4 if on_cpu else 2,
        ),
        vocab_size=model_config.vocab_size,
        max_model_len=max_model_len,
        limits=limits,
        identity=root_key(str(folder), str(dtype), str(kv_dtype)),
        backend=backend.name,
        device=f"{config.tensor_parallel_size} x {devices[0].device_kind}",
        tokenizer=tokenizer,
        model_config=model_config,
    )


def _model_length(wanted: int | None, config: ModelConfig) -> int:
    limit = config.max_position_embeddings
    if wanted is None:
        return limit
    if wanted > limit:
        raise InvalidConfigError(
            f"max_model_len is {wanted}; the model knows positions up to {limit}: lower it"
        )
    if wanted < 2:
        raise InvalidConfigError("max_model_len is 1; a prompt and an output need at least 2")
    return wanted


def _load_tokenizer(config: EngineConfig, folder) -> Tokenizer | None:
    settings = config.model
    if settings.skip_tokenizer_init:
        return None
    own = folder
    if isinstance(settings.tokenizer, str):
        given = settings.tokenizer
        if pathlib.Path(given).is_file():
            own = given
        else:
            own = resolve_folder(given, settings.revision, settings.hf_token, weights=False)
    elif settings.tokenizer is not None:
        own = settings.tokenizer
    tokenizer = Tokenizer(own, chat_template=settings.chat_template, model_folder=folder)
    _check_generation(tokenizer, f"{folder}/generation_config.json")
    return tokenizer


def _check_generation(tokenizer: Tokenizer, path: str) -> None:
    """Refuse at the start what would make each request fail."""
    try:
        SamplingParams(**tokenizer.generation.sampling)
    except InvalidRequestError as error:
        raise InvalidConfigError(f"{path}: {error}") from error
    ends, most = len(tokenizer.eos_token_ids), LIMITS.eos_token_ids
    if ends > most:
        raise InvalidConfigError(
            f"{path} and the tokenizer name {ends} end-of-sequence ids; at most {most} fit: take "
            "some out of eos_token_id"
        )
