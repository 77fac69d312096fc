"""The engine of `live_server` as the factory of an engine process, with grammars that can fail."""

from pathlib import Path
from typing import Any

from rjax.engine.llm_engine import LLMEngine

from .live_server import make_engine

DOOMED = "[ab]{24}"
"""A regex; the masks of its second sample, or of a single one, fail after three tokens."""


def make(folder: str) -> LLMEngine:
    """An engine over the folder of a model."""
    engine = make_engine(Path(folder))
    plain = engine.structured_masks

    def masks(params: Any, wanted: Any = None) -> Any:
        found = plain(params, wanted)
        if wanted is not None and wanted.constraint.source == DOOMED:
            _doom(found[-1] if len(found) < 3 else found[1])
        return found

    engine.structured_masks = masks
    return engine


def _doom(mask: Any) -> None:
    accept, left = mask.accept, [3]

    def fail(token: int) -> None:
        left[0] -= 1
        if not left[0]:
            mask._fail("no token fits the grammar")
        accept(token)

    mask.accept = fail
