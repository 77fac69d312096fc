"""Builds an engine: loads the model, makes the worker, and wires the two together."""

import pathlib

import jax
import jax.numpy as jnp

from models import BUNDLED_MODEL, ModelConfig, config_from_folder, load_model, resolve_folder
from rjax.batch.page_hash import root_key
from rjax.batch.step_limits import StepLimits, choose_step_limits
from rjax.config import EngineConfig
from rjax.engine.llm_engine import LLMEngine
from rjax.engine.parts import EngineParts
from rjax.errors import InvalidConfigError, InvalidRequestError
from rjax.sampling import LIMITS, SamplingParams
from rjax.startup_times import StartupTimes
from rjax.tokenization import Tokenizer
from rjax.worker.backend import choose_backend
from rjax.worker.compilation_cache import keep_compiled
from rjax.worker.dtype import choose_dtype, choose_kv_dtype
from rjax.worker.memory_sizing import check_weights_fit
from rjax.worker.multi_step_policy import multi_step_policy
from rjax.worker.step_sizing import gpu_pool_tokens, shape_table
from rjax.worker.worker import Worker


def build_engine(config: EngineConfig) -> LLMEngine:
    """An engine with its model loaded and its worker made.

    Raises:
        InvalidConfigError: a setting that this model or machine cannot meet.
        OutOfMemoryError: weights or KV pool do not fit.
    """
    keep_compiled(config.compilation_cache_dir)
    settings = config.model
    folder = resolve_folder(settings.model or BUNDLED_MODEL, settings.revision, settings.hf_token)
    model_config = config_from_folder(folder)
    max_model_len = _model_length(settings.max_model_len, model_config)
    times = StartupTimes()
    with times.phase("tokenizer"):
        tokenizer = _load_tokenizer(config, folder)
    with times.phase("device"):
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
    with times.phase("weights"):
        loaded = load_model(
            folder,
            dtype=dtype,
            load_format=settings.load_format,
            mesh=mesh,
            seed=settings.seed,
            progress=config.use_tqdm,
        )
    growth = 4 if on_cpu else 2

    def pool_tokens(limits: StepLimits) -> int:
        shapes = shape_table(
            config, backend=backend, max_model_len=max_model_len, limits=limits, growth=growth
        )
        return gpu_pool_tokens(
            config,
            model_config,
            shapes,
            limits=limits,
            dtype=dtype,
            kv_dtype=kv_dtype,
            memory=devices[0].memory_stats(),
            num_devices=mesh.size,
        )

    limits = choose_step_limits(
        config.scheduler,
        most_tokens=512 if on_cpu else 2048,
        spare_rows=backend.spare_rows,
        max_model_len=max_model_len,
        pool_tokens=pool_tokens if "bytes_limit" in (devices[0].memory_stats() or ()) else None,
    )
    with times.phase("pool"):
        worker = Worker(
            loaded,
            config,
            backend=backend,
            kv_dtype=kv_dtype,
            mesh=mesh,
            max_model_len=max_model_len,
            limits=limits,
            growth=growth,
            policy=multi_step_policy(config, platform=devices[0].platform),
        )
    parts = EngineParts(
        config=config,
        worker=worker,
        vocab_size=model_config.vocab_size,
        max_model_len=max_model_len,
        limits=limits,
        identity=root_key(str(folder), str(dtype), str(kv_dtype)),
        backend=backend.name,
        device=f"{config.tensor_parallel_size} x {devices[0].device_kind}",
        tokenizer=tokenizer,
        model_config=model_config,
        startup_times=times,
    )
    with times.phase("warm-up"):
        worker.warmup(config.warmup)
    return LLMEngine(parts)


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
