"""What the commands show of an engine at its start."""

from rjax.batch.step_limits import StepLimits
from rjax.batch.step_worker import PoolSize
from rjax.config import EngineConfig
from rjax.engine_platform import EnginePlatform
from rjax.memory_sizes import GIB
from rjax.models import Decoder, ModelConfig


def engine_summary(
    config: EngineConfig,
    model: Decoder,
    platform: EnginePlatform,
    *,
    max_model_len: int,
    limits: StepLimits,
    pool: PoolSize,
    num_decode_steps: int,
) -> dict[str, str]:
    """The facts of a start, by name, in the order in which to show them.

    Args:
        config: of the engine.
        model: its model.
        platform: devices, dtypes and kernels.
        max_model_len: tokens of the longest sequence.
        limits: of the steps.
        pool: size of the KV pool.
        num_decode_steps: decode steps of one program at most.
    """
    page_size = config.cache.page_size
    size = pool.num_pages * pool.page_bytes / GIB
    return {
        "model": model_name(config, model.config),
        "weights": f"{weight_types(model.config, platform)}, {model.weight_bytes / GIB:.2f} GiB",
        "dtype": dtype_names(platform),
        "context": f"{max_model_len:,} tokens",
        "KV pool": f"{pool.num_pages * page_size:,} tokens "
        f"({pool.num_pages:,} pages of {page_size}, {size:.2f} GiB)",
        "batch": f"{limits.max_num_seqs:,} sequences, {limits.max_num_batched_tokens:,} tokens a "
        "step",
        "decode steps": _decode_steps(num_decode_steps),
        "backend": f"{platform.backend.name} on {platform.description}",
        "kernels": _kernels(platform, model.config),
    }


def model_name(config: EngineConfig, model: ModelConfig) -> str:
    """The model as given, with its architecture."""
    return f"{config.model.model or 'tables, the bundled model'} ({model.architecture})"


def weight_types(model: ModelConfig, platform: EnginePlatform) -> str:
    """How the weights of the projections are stored."""
    names = sorted({scheme.name for _, scheme in model.schemes})
    if not names:
        return platform.dtype.name
    how = "quantised at loading" if model.quant_method is None else "as in the checkpoint"
    return f"{' and '.join(names)} ({how})"


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


def _kernels(platform: EnginePlatform, model: ModelConfig) -> str:
    """Which kernels run, and why not the faster ones."""
    backend = platform.backend
    if platform.is_cpu:
        return "XLA's own; the others need a GPU"
    if backend.streamed_rows:
        rest = f"weights are streamed in steps of up to {backend.spare_rows} rows"
    elif model.schemes and backend.name == "mosaic":
        rest = "quantised weights are streamed in steps of up to 64 rows"
    elif model.schemes:
        rest = "XLA's own for the rest, which dequantise the weights before each product"
    else:
        rest = "XLA's own for the rest"
    refused = "".join(f"; {name}: {reason}" for name, reason in backend.refused)
    return f"{backend.name} attention; {rest}{refused}"
