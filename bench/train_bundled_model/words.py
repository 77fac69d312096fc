"""Word lists, and the rule that keeps words for evaluation apart from words for training.

``words.json`` holds short lists written by hand, ``lists/`` long ones: ``first_names.txt`` and
``surnames.txt`` are names of the 1990 census of the United States (a work of its government, in the
public domain), ``english.txt`` is a sample of Webster's Second International Dictionary of 1934
(copyright lapsed). ``unseen.json`` holds real names and values that training never sees.
"""

import functools
import json
import zlib
from pathlib import Path
from typing import Literal

HERE = Path(__file__).parent
HELD_OUT = 8  # one word in this many is kept for evaluation

Pool = Literal["training", "held_out", "real"]
"""Where words come from.

``training``: lists and generated words, less those kept for evaluation. ``held_out``: those kept,
drawn in the same way. ``real``: ``unseen.json`` and the names of the lists that are kept for
evaluation; nothing is generated.
"""


@functools.cache
def _lists(file: str) -> dict[str, list[str]]:
    return json.loads((HERE / file).read_text(encoding="utf-8"))


@functools.cache
def _unseen() -> frozenset[str]:
    return frozenset(word.casefold() for words in _lists("unseen.json").values() for word in words)


def is_held_out(word: str) -> bool:
    """Whether a word is reserved for evaluation.

    The CRC-32 of its spelling decides, or ``unseen.json``. The rule needs no list, so it also holds
    for generated words, of which there are more than could be written down.
    """
    return zlib.crc32(word.encode()) % HELD_OUT == 0 or word.casefold() in _unseen()


def words(name: str) -> list[str]:
    """One list, in the order that the generator's determinism rests on; repeats weigh a word."""
    path = HERE / "lists" / f"{name}.txt"
    return path.read_text(encoding="utf-8").split() if path.exists() else _lists("words.json")[name]


@functools.cache
def pool(name: str, which: Pool) -> tuple[str, ...]:
    """The words of one list that belong to a pool."""
    if which == "training":
        return tuple(word for word in words(name) if not is_held_out(word))
    kept = tuple(word for word in words(name) if is_held_out(word))
    if which == "held_out":
        return kept
    unseen = tuple(_lists("unseen.json").get(name, ()))
    if name in ("first_names", "surnames"):
        # As many census names as hand-written ones, or the census would drown them.
        return unseen + tuple(word for word in kept if len(word) >= 5)[:: max(1, len(kept) // 120)]
    return unseen or kept
