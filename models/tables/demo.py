"""The demo: a table and questions about it, for commands without a prompt."""

import functools
import json
from pathlib import Path
from typing import Any

DEMO_FILE: Path = Path(__file__).parent / "demo.json"
"""Written by ``python -m bench.train_bundled_model.make_demo``."""


def demo_system_prompt() -> str:
    """A system message with a table of 24 people."""
    return _demo()["system_prompt"]


def demo_questions() -> list[tuple[str, str]]:
    """16 questions about the table, each with the model's answer.

    The bundled model answers all of them correctly, so that a wrong answer points to the
    installation.
    """
    return [(question, answer) for question, answer in _demo()["questions"]]


@functools.cache
def _demo() -> dict[str, Any]:
    return json.loads(DEMO_FILE.read_text(encoding="utf-8"))
