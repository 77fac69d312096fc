"""The options that benchmarks share, and the settings that they give."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from rjax.benchmarks.model_shapes import SHAPES
from rjax.cli.arguments import StoreModel
from rjax.cli.parser import OneLineParser
from rjax.cli.values import some_of, whole, whole_or_auto


def given_settings[S](kind: type[S], arguments: argparse.Namespace) -> S:
    """A dataclass of settings, from the options with the names of its fields."""
    fields: Any = dataclasses.fields(kind)  # pyright: ignore[reportArgumentType]
    return kind(**{field.name: getattr(arguments, field.name) for field in fields})


def benchmark_parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the module's docstring, with the options of every benchmark of
    ``rjax bench``."""
    p = OneLineParser(
        prog=name,
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    p.add_argument("--json", metavar="FILE", type=Path, help="file for the result")
    p.add_argument("--quiet", action="store_true", help="no progress bar")
    return p


def add_time_limit(p: argparse.ArgumentParser) -> None:
    """Add --seconds, for benchmarks that iterate over points with ``in_time``."""
    p.add_argument("--seconds", type=float, help="start no further point after this many seconds")


def add_relay_modes(p: argparse.ArgumentParser) -> None:
    """Add --relay, for benchmarks that run the engine in several modes."""
    modes = "auto", "on", "off"
    told = f"modes to compare: {', '.join(modes)}"
    p.add_argument("--relay", type=some_of(*modes), default="auto,off", help=told)


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
