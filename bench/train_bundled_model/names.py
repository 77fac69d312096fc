"""Names of people, in pools that share no first name and no surname."""

import random

from bench.train_bundled_model.strings import accented, broken, foreign, letters, syllables
from bench.train_bundled_model.words import Pool, is_held_out, pool, words

_ENDINGS = words("surname_endings")
_PARTICLES = words("particles")

KINDS = ("listed", "syllables", "letters", "joined", "accented", "foreign")
Mix = tuple[float, float, float, float, float, float]  # weights in the order of KINDS
MIXES: tuple[Mix, ...] = (
    (1.0, 0.0, 0.0, 0.0, 0.0, 0.0),
    (0.8, 0.0, 0.0, 0.15, 0.05, 0.0),
    (0.3, 0.3, 0.15, 0.1, 0.1, 0.05),
    (0.1, 0.35, 0.35, 0.1, 0.05, 0.05),
)
_REAL: Mix = (0.95, 0.0, 0.0, 0.05, 0.0, 0.0)


def random_mix(rng: random.Random, which: Pool) -> Mix:
    """The kinds of names that one table has."""
    return _REAL if which == "real" else rng.choice(MIXES)


def _word(rng: random.Random, name: str, kind: str, which: Pool) -> str:
    """One word of a kind that belongs to the pool."""
    if kind in ("listed", "joined"):
        return rng.choice(pool(name, which))
    while True:
        if kind == "letters":
            word = letters(rng).capitalize()
        elif kind == "foreign":
            word = foreign(rng)
        elif name == "surnames" and rng.random() < 0.4:
            word = (syllables(rng, 1) + rng.choice(_ENDINGS)).capitalize()
        else:
            word = syllables(rng, 2 if rng.random() < 0.75 else 3).capitalize()
        if kind == "accented":
            change = rng.choice((accented, accented, broken))
            word = change(rng, rng.choice((word, rng.choice(pool(name, which)))))
        if len(word) >= 2 and is_held_out(word) == (which != "training"):
            return word


def _kind(rng: random.Random, mix: Mix) -> str:
    return rng.choices(KINDS, mix)[0]


def first_name(rng: random.Random, mix: Mix, which: Pool) -> str:
    """A first name: one word, two words, two with a hyphen, or initials."""
    kind = _kind(rng, mix)
    word = _word(rng, "first_names", kind, which)
    if kind != "joined":
        return word
    other = _word(rng, "first_names", kind, which)
    return rng.choice((f"{word} {other}", f"{word}-{other}", f"{word} {other[0]}.", f"{word[0]}."))


def surname(rng: random.Random, mix: Mix, which: Pool) -> str:
    """A surname: one word, two words, two with a hyphen, or one with a particle."""
    kind = _kind(rng, mix)
    word = _word(rng, "surnames", kind, which)
    if kind != "joined":
        return word
    other = _word(rng, "surnames", kind, which)
    particle = rng.choice(_PARTICLES)
    return rng.choice(
        (f"{word}-{other}", f"{word} {other}", f"{particle} {word}", f"O'{word}", f"{word} Jr.")
    )
