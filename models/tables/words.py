"""The word lists of words.json."""

import functools
import json
from pathlib import Path


@functools.cache
def _lists() -> dict[str, list[str]]:
    return json.loads((Path(__file__).parent / "words.json").read_text(encoding="utf-8"))


def words(name: str) -> list[str]:
    """One list, in its order, which the generator's determinism rests on; repeats weigh a word."""
    return _lists()[name]
