"""Engines for the benchmarks: of a model folder, the bundled model, or random weights."""

import contextlib
import dataclasses
import gc
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rjax.benchmarks.model_shapes import SHAPES, write_folder
from rjax.config import AutoInt


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The model of a benchmark, and the size of its engine.

    Attributes:
        model: folder or hub id; None is the bundled model.
        shapes: a name of `SHAPES`, for random weights instead of ``model``.
        quantization: how weights are quantised at loading.
        max_num_seqs: sequences running at once.
        max_num_prefill_ahead: waiting sequences whose prompts are computed while the others run.
        max_num_batched_tokens: token budget of a step.
        num_decode_steps: decode steps started at once; "auto" also warms up.
        num_pages: KV pages; None is what the requests need twice.
        page_size: tokens a page.
        backend: attention kernels.
        seed: seed of weights, prompts and sampling.
        quiet: show no progress bar.
    """

    model: str | None
    shapes: str | None
    quantization: str | None
    max_num_seqs: int
    max_num_prefill_ahead: int | None
    max_num_batched_tokens: int | None
    num_decode_steps: AutoInt
    num_pages: int | None
    page_size: int
    backend: str
    seed: int
    quiet: bool


def model_name(settings: EngineSettings) -> str:
    """Name of the model in tables, with its quantisation; a path is named by its last component."""
    name = settings.shapes or (Path(settings.model).name if settings.model else "bundled")
    return name if settings.quantization is None else f"{name}, {settings.quantization}"


def model_length(settings: EngineSettings) -> int:
    """Tokens of the longest sequence that the model knows."""
    if settings.shapes is not None:
        return SHAPES[settings.shapes]["max_position_embeddings"]
    from rjax.models import BUNDLED_MODEL, config_from_folder, resolve_folder

    folder = resolve_folder(settings.model or BUNDLED_MODEL, weights=False)
    return config_from_folder(folder).default_length


def pool_pages(settings: EngineSettings, own: int, prefixes: Sequence[int]) -> int:
    """The given number of pages, or twice what all running sequences and the prefixes need.

    With a fixed size the engine does not profile memory, which would compile a step.
    """
    if settings.num_pages is not None:
        return settings.num_pages
    pages = sum(-(-length // settings.page_size) for length in prefixes)
    return 2 * (pages + settings.max_num_seqs * (-(-own // settings.page_size) + 1))


@contextlib.contextmanager
def running_llm(
    settings: EngineSettings, *, relay: str, max_model_len: int, num_pages: int | None = None
) -> Iterator[Any]:
    """Context manager for an LLM; frees its memory at the end."""
    from rjax import LLM

    given: dict[str, Any] = {
        "quantization": settings.quantization,
        # The weights that --quantization names are measured, also where wide ones are faster.
        "dequantize": "auto" if settings.quantization is None else "off",
        "max_num_seqs": settings.max_num_seqs,
        "max_num_prefill_ahead": settings.max_num_prefill_ahead,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "num_decode_steps": settings.num_decode_steps,
        "warmup": "on" if settings.num_decode_steps == "auto" else "off",
        "num_pages": settings.num_pages if num_pages is None else num_pages,
        "page_size": settings.page_size,
        "backend": settings.backend,
        "seed": settings.seed,
        "use_tqdm": not settings.quiet,
    }
    with tempfile.TemporaryDirectory() as folder:
        model = settings.model
        if settings.shapes is not None:
            model = str(write_folder(settings.shapes, Path(folder) / settings.shapes))
            given |= {"load_format": "dummy", "skip_tokenizer_init": True}
        llm = LLM(model, enable_relay_attention=relay, max_model_len=max_model_len, **given)  # pyright: ignore[reportArgumentType]
        try:
            yield llm
        finally:
            del llm
            gc.collect()
