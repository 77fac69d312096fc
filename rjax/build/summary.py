"""What the commands show of an engine at its start."""

import dataclasses
from collections.abc import Iterable

from jax.typing import DTypeLike

from rjax.batch.page_groups import pages_held
from rjax.batch.step_worker import PoolSize
from rjax.config import EngineConfig
from rjax.config.memory_sizes import GIB
from rjax.models import Decoder, ModelConfig
from rjax.worker.backend import Backend
from rjax.worker.engine_plan import EnginePlan, EnginePlatform
from rjax.worker.kernels.uses import dequantised_projections


def engine_summary(
    plan: EnginePlan, model: Decoder, *, pool: PoolSize, num_decode_steps: int
) -> dict[str, str]:
    """The facts of a start, by name, in the order in which to show them.

    Args:
        plan: the engine's plan.
        model: its model.
        pool: size of the KV pool.
        num_decode_steps: most decode steps of one program.
    """
    config, limits, max_model_len = plan.config, plan.limits, plan.max_model_len
    page_size = config.cache.page_size
    size = pool.num_pages * pool.page_bytes / GIB
    tokens = pool.num_pages * page_size
    if pool.windows != (None,):
        # As many sequences of full length as fit.
        tokens = (
            pool.num_pages * max_model_len // pages_held(pool.windows, max_model_len, page_size)
        )
    devices = plan.mesh.size
    return {
        "model": model_name(config, model.config),
        "input": model_input(model.config),
        "weights": f"{weight_types(model)}, {model.weight_bytes / GIB:.2f} GiB"
        + _on_each(plan.weight_bytes, devices)
        + (_why_dequantised(config, model) if model.config.dequantised else ""),
        "dtype": dtype_names(plan),
        "context": f"{max_model_len:,} tokens",
        "KV pool": f"{tokens:,} tokens ({pool.num_pages:,} pages of {page_size}, {size:.2f} GiB"
        + _on_each(pool.num_pages * pool.page_bytes // devices, devices)
        + _copies(model.config)
        + ")"
        + _windows(pool, model.config),
        **_states(pool, page_size),
        "batch": f"{limits.max_num_seqs:,} sequences, {limits.max_num_batched_tokens:,} tokens a "
        "step",
        "decode steps": _decode_steps(num_decode_steps),
        "backend": f"{plan.backend.name} on {plan.description}",
        "kernels": "XLA's own; the others need a GPU"
        if plan.is_cpu
        else gpu_kernels(
            plan.backend,
            model.config,
            plan.dtype,
            devices=devices,
            step_rows=[shape.rows for shape in plan.shapes.all],
        ),
    }


def _states(pool: PoolSize, page_size: int) -> dict[str, str]:
    """The pool of states of a model with linear attention."""
    if pool.states is None:
        return {}
    count, size = pool.states.num_states, pool.states.state_bytes
    snapshot = pool.states.snapshot_pages * page_size
    return {
        "states": f"{count:,} of {size / 2**20:,.1f} MiB, {count * size / GIB:.2f} GiB; a snapshot "
        f"at every {snapshot:,} tokens of a prompt, and where prompts part"
    }


def _windows(pool: PoolSize, model: ModelConfig) -> str:
    """Which layers give pages back, and how pages are divided."""
    if pool.windows == (None,):
        return ""
    found = sorted({window for window in pool.windows if window is not None})
    kept = sum(window not in found for window in model.sliding_windows)
    sizes = " and ".join(f"{window:,}" for window in found)
    return (
        f"; {model.num_layers - kept} of {model.num_layers} layers keep a window of {sizes} "
        f"tokens, {len(pool.windows)} page group{'s' if len(pool.windows) > 1 else ''}"
    )


def _on_each(size: int, devices: int) -> str:
    """Bytes of one of several devices."""
    return f", {size / GIB:.2f} GiB on each of {devices} devices" if devices > 1 else ""


def _copies(model: ModelConfig) -> str:
    """How often KV heads are held."""
    copies = max([model.kv_head_copies, *(layer.kv_head_copies for layer in model.layers)])
    most = "up to " if model.layers else ""
    return f", with {most}{copies} copies of each KV head" if copies > 1 else ""


def model_name(config: EngineConfig, model: ModelConfig) -> str:
    """The model as given, with its architecture."""
    return f"{config.model.model or 'tables, the bundled model'} ({model.architecture})"


def model_input(model: ModelConfig) -> str:
    """What requests may consist of, and what else the model would take."""
    if model.text_model is None:
        return "text"
    return f"text only: the model also takes {model.text_model.media}, which rjax does not serve"


def weight_types(model: Decoder) -> str:
    """How the weights of the projections are stored."""
    config = model.config
    names = " and ".join(
        sorted({scheme.name for _, scheme in config.schemes or config.dequantised})
    )
    on_load = config.quant_method is None
    if config.dequantised:
        how = f"not quantised to {names}" if on_load else f"dequantised, {names} in the checkpoint"
        return f"{model.dtype.name} ({how})"
    if not names:
        return model.dtype.name
    return f"{names} ({'quantised at loading' if on_load else 'as in the checkpoint'})"


def _why_dequantised(config: EngineConfig, model: Decoder) -> str:
    """What the weights cost and gain in the model's dtype."""
    quantised = dataclasses.replace(model.config, schemes=model.config.dequantised, dequantised=())
    more = (model.weight_bytes - Decoder(quantised, model.dtype).weight_bytes) / GIB
    faster = "faster on this device; " if config.model.dequantize == "auto" else ""
    return f": {faster}{more:.2f} GiB more"


def dtype_names(platform: EnginePlatform) -> str:
    """The dtypes of activations and KV."""
    weights, kv = platform.dtype.name, platform.kv_dtype.name
    return weights if weights == kv else f"{weights}, KV {kv}"


def summary_lines(facts: dict[str, str]) -> list[str]:
    """The facts in two aligned columns."""
    width = max(map(len, facts))
    return [f"{name:{width}}  {value}" for name, value in facts.items()]


def _decode_steps(number: int) -> str:
    return "each starts as one program" if number == 1 else f"up to {number} start as one program"


def gpu_kernels(
    backend: Backend,
    model: ModelConfig,
    dtype: DTypeLike,
    *,
    devices: int,
    step_rows: Iterable[int],
) -> str:
    """Which kernels run on GPUs, and why not the faster ones.

    Args:
        backend: its kernels.
        model: its shapes and schemes.
        dtype: dtype of the activations.
        devices: number of devices that the projections are sharded over.
        step_rows: rows of the compiled steps.
    """
    if model.schemes:
        rest = _quantised_weights(backend, model, dtype, devices, step_rows)
    elif backend.streamed_rows:
        rest = f"weights are streamed in steps of up to {backend.spare_rows} rows"
    else:
        rest = "XLA's own for the rest"
    refused = "".join(f"; {name}: {reason}" for name, reason in backend.refused)
    return f"{backend.name} attention; {rest}{refused}"


def _quantised_weights(
    backend: Backend,
    model: ModelConfig,
    dtype: DTypeLike,
    devices: int,
    step_rows: Iterable[int],
) -> str:
    """The steps in which kernels read quantised weights; XLA dequantises them in the others."""
    found = dequantised_projections(
        backend, model, dtype, devices=devices, rows=sorted(set(step_rows))
    )
    parts = []
    by_steps: dict[tuple[int, ...], list[str]] = {}
    for projection, reasons in found.items():
        direct = tuple(rows for rows, reason in reasons.items() if reason is None)
        by_steps.setdefault(direct, []).append(projection)
    for direct, projections in by_steps.items():
        which = "quantised weights" if len(by_steps) == 1 else f"those of {', '.join(projections)}"
        reasons = found[projections[0]]
        if len(direct) == len(reasons):
            parts.append(f"kernels read {which} as they are in all steps")
        elif direct:
            parts.append(f"kernels read {which} as they are in {_some_steps(direct, reasons)}")
        else:
            why = next(iter(reasons.values()))
            parts.append(f"XLA dequantises {which} in all steps" + (f" ({why})" if why else ""))
    return "; ".join(parts)


def _some_steps(direct: tuple[int, ...], sizes: Iterable[int]) -> str:
    """Some step sizes in words, and what happens in the others."""
    most = max(direct)
    if all(size in direct for size in sizes if size < most):
        return f"steps of up to {most} rows, XLA dequantises them in larger ones"
    return f"steps of {', '.join(map(str, direct))} rows, XLA dequantises them in others"
