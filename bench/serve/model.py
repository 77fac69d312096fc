"""A model folder for `rjax serve` with random weights: any shapes, and a text for every token."""

import json
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rjax.benchmarks.model_shapes import SHAPES
from rjax.models import BUNDLED_MODEL


def write_served_model(shapes: str, folder: Path) -> None:
    """Write the configuration, and the bundled model's tokenizer with words for further tokens.

    Args:
        shapes: a key of `SHAPES`.
        folder: that exists.
    """
    # With its version transformers takes the tokenizer as it is.
    config: dict[str, Any] = {**SHAPES[shapes], "transformers_version": version("transformers")}
    tokenizer = json.loads((BUNDLED_MODEL / "tokenizer.json").read_text("utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    first = len(vocabulary)
    if config["vocab_size"] < first:
        config |= {"vocab_size": first}
    # No merge makes them, so prompts are encoded as by the bundled model.
    vocabulary |= {f"\u0120word{i}": i for i in range(first, config["vocab_size"])}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    shutil.copy(BUNDLED_MODEL / "tokenizer_config.json", folder)
