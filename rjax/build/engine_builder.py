"""Builds an engine: loads the model, makes the worker, and wires the two together."""

import functools
import pathlib
from typing import Any

import jax

from rjax.batch.page_hash import root_key
from rjax.build.plan_engine import choose_platform, choose_weights, plan_engine
from rjax.build.summary import engine_summary
from rjax.config import EngineConfig
from rjax.config.quantization_names import check_quantization
from rjax.console import bars_are_seen
from rjax.engine.llm_engine import LLMEngine
from rjax.engine.parts import EngineParts
from rjax.engine.startup_times import StartupTimes
from rjax.errors import InvalidConfigError, InvalidRequestError
from rjax.models import (
    BUNDLED_MODEL,
    ModelConfig,
    config_from_folder,
    load_model,
    resolve_folder,
    weights_digest,
)
from rjax.models.families import FAMILIES
from rjax.sampling import LIMITS, SamplingParams
from rjax.tokenization import Tokenizer
from rjax.worker.memory import check_weights_fit
from rjax.worker.programs.cache import keep_compiled
from rjax.worker.step.multi_step_policy import multi_step_policy
from rjax.worker.worker import Worker


def build_engine(config: EngineConfig) -> LLMEngine:
    """An engine with its model loaded and its worker made.

    Raises:
        InvalidConfigError: a setting that this model or machine cannot meet.
        OutOfMemoryError: weights or KV pool do not fit.
    """
    settings = config.model
    check_quantization(settings.quantization)
    keep_compiled(config.compilation_cache_dir)
    folder = resolve_folder(settings.model or BUNDLED_MODEL, settings.revision, settings.hf_token)
    model_config = config_from_folder(folder, settings.quantization)
    max_model_len = _model_length(settings.max_model_len, model_config)
    stored_config = model_config
    model_config = model_config.for_length(max_model_len)
    times = StartupTimes()
    with times.phase("tokenizer"):
        tokenizer = _load_tokenizer(config, folder)
    with times.phase("device"):
        jax.devices()
    model_config = choose_weights(config, model_config)
    platform = choose_platform(config, model_config, max_model_len)
    model_config, mesh = platform.model, platform.mesh
    check_weights_fit(
        platform.weight_bytes * mesh.size,
        memory=platform.first_device.memory_stats(),
        num_devices=config.tensor_parallel_size,
        utilization=config.cache.gpu_memory_utilization,
    )
    load = functools.partial(
        load_model,
        folder,
        dtype=platform.dtype,
        load_format=settings.load_format,
        quantization=settings.quantization,
        dequantize=bool(model_config.dequantised),
        mesh=mesh,
        seed=settings.seed,
        progress=config.use_tqdm and bars_are_seen(),
        max_length=max_model_len,
        expert_parallel=config.enable_expert_parallel,
    )
    with times.phase("weights"):
        loaded = load()
        dummy = settings.load_format == "dummy"
        unused = FAMILIES[model_config.architecture].unused(model_config)
        weights = f"dummy {settings.seed}" if dummy else weights_digest(folder, unused)
    quantization = None if model_config.dequantised else settings.quantization
    plan = plan_engine(platform)
    with times.phase("pool"):
        policy = multi_step_policy(config, platform=plan.first_device.platform)
        worker = Worker(loaded, plan, policy, reload=load)
    parts = EngineParts(
        config=config,
        worker=worker,
        vocab_size=model_config.vocab_size,
        max_model_len=max_model_len,
        limits=plan.limits,
        identity=root_key(
            repr(stored_config),
            weights,
            str(plan.dtype),
            str(plan.kv_dtype),
            str(quantization),
            *([str(max_model_len)] if model_config.depends_on_length else []),
        ),
        backend=plan.backend.name,
        device=plan.description,
        tokenizer=tokenizer,
        model_config=model_config,
        startup_times=times,
        summary=engine_summary(
            plan, loaded.model, pool=worker.pool, num_decode_steps=worker.num_decode_steps
        ),
    )
    with times.phase("warm-up"):
        worker.warmup(config.warmup)
    return LLMEngine(parts)


def build_engine_from_options(**options: Any) -> LLMEngine:
    """`build_engine` with flat options, as `EngineConfig.from_options` takes them."""
    return build_engine(EngineConfig.from_options(options))


def _model_length(wanted: int | None, config: ModelConfig) -> int:
    limit = config.longest_sequence
    if wanted is None:
        return config.default_length
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
            f"{path} (or config.json) and the tokenizer name {ends} end-of-sequence ids; at most "
            f"{most} fit: take some out of eos_token_id"
        )
