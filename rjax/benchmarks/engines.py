"""Engines for the benchmarks: of a model folder, the bundled model, or random weights."""

import argparse
import contextlib
import gc
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rjax.benchmarks.model_shapes import SHAPES, write_folder
from rjax.benchmarks.options import whole, whole_or_auto
from rjax.cli.arguments import StoreModel


def add_engine_options(p: argparse.ArgumentParser) -> None:
    """Options for the model and the size of the engine."""
    p.add_argument(
        "--model", action=StoreModel, help="model folder or hub id; default: the bundled model"
    )
    p.add_argument("--shapes", choices=sorted(SHAPES), help="a model's shapes, random weights")
    p.add_argument("--quantization", "-q", metavar="NAME", help="quantise the weights at loading")
    p.add_argument("--max-num-seqs", type=whole(1), default=64, help="sequences running at once")
    p.add_argument(
        "--max-num-prefill-ahead",
        type=whole(0),
        help="waiting sequences whose prompts are computed while the others run",
    )
    p.add_argument("--max-num-batched-tokens", type=whole(1), help="token budget of a step")
    p.add_argument(
        "--num-decode-steps",
        type=whole_or_auto(1),
        default=1,
        help="decode steps started at once; auto also warms up",
    )
    p.add_argument(
        "--num-pages", type=whole(1), help="KV pages; default: what the requests need twice"
    )
    p.add_argument("--page-size", "--block-size", type=whole(1), default=64, help="tokens a page")
    p.add_argument("--backend", default="auto", help="attention kernels: auto, mosaic or xla")
    p.add_argument("--seed", type=whole(0), default=0, help="of weights, prompts and sampling")


def model_name(options: argparse.Namespace) -> str:
    """Name of the model in tables, with its quantisation; a path is named by its last component."""
    name = options.shapes or (Path(options.model).name if options.model else "bundled")
    return name if options.quantization is None else f"{name}, {options.quantization}"


def model_length(options: argparse.Namespace) -> int:
    """Tokens of the longest sequence that the model knows."""
    if options.shapes is not None:
        return SHAPES[options.shapes]["max_position_embeddings"]
    from rjax.models import BUNDLED_MODEL, config_from_folder, resolve_folder

    folder = resolve_folder(options.model or BUNDLED_MODEL, weights=False)
    return config_from_folder(folder).default_length


def pool_pages(options: argparse.Namespace, own: int, prefixes: Sequence[int] = ()) -> int:
    """The given number of pages, or twice what all running sequences and the prefixes need.

    With a fixed size the engine does not profile memory, which would compile a step.
    """
    if options.num_pages is not None:
        return options.num_pages
    lengths = prefixes or (options.prefix,)
    pages = sum(-(-length // options.page_size) for length in lengths)
    return 2 * (pages + options.max_num_seqs * (-(-own // options.page_size) + 1))


@contextlib.contextmanager
def running_llm(
    options: argparse.Namespace, *, relay: str, max_model_len: int, num_pages: int | None = None
) -> Iterator[Any]:
    """Context manager for an LLM; frees its memory at the end."""
    from rjax import LLM

    given: dict[str, Any] = {
        "quantization": options.quantization,
        # The weights that --quantization names are measured, also where wide ones are faster.
        "dequantize": "auto" if options.quantization is None else "off",
        "max_num_seqs": options.max_num_seqs,
        "max_num_prefill_ahead": options.max_num_prefill_ahead,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "num_decode_steps": options.num_decode_steps,
        "warmup": "on" if options.num_decode_steps == "auto" else "off",
        "num_pages": options.num_pages if num_pages is None else num_pages,
        "page_size": options.page_size,
        "backend": options.backend,
        "seed": options.seed,
        "use_tqdm": not options.quiet,
    }
    with tempfile.TemporaryDirectory() as folder:
        model = options.model
        if options.shapes is not None:
            model = str(write_folder(options.shapes, Path(folder) / options.shapes))
            given |= {"load_format": "dummy", "skip_tokenizer_init": True}
        llm = LLM(model, enable_relay_attention=relay, max_model_len=max_model_len, **given)  # pyright: ignore[reportArgumentType]
        try:
            yield llm
        finally:
            del llm
            gc.collect()
