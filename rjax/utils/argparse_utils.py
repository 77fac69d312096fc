"""FlexibleArgumentParser, in the module where vLLM has it."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from rjax.cli.parser import OneLineParser
from rjax.vllm.options import instead_of


class FlexibleArgumentParser(OneLineParser):
    """An argument parser that takes ``--max_model_len`` for ``--max-model-len``, and says what
    takes the place of vLLM's flags that rjax lacks.

    Args:
        settings: those of ``argparse.ArgumentParser``.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(instead=instead_of, **settings)

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse after bringing the names of flags into one form."""
        given = sys.argv[1:] if args is None else args
        return super().parse_known_args([_with_dashes(text) for text in given], namespace)


def _with_dashes(text: str) -> str:
    if not text.startswith("--"):
        return text
    name, sign, value = text.partition("=")
    return name.replace("_", "-") + sign + value
