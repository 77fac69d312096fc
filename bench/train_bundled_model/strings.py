"""Random strings of many shapes: what a model can only copy, since it cannot know them."""

import random

from bench.train_bundled_model.words import words

_ONSETS = words("onsets")
_VOWELS = words("vowels")
_CODAS = words("codas")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_COMMON = "eeeeeaaaaiiiooouunnnrrrssstttllldddhhmmggkkbbccppvvffwzyjxq"
_ACCENTS = {
    "a": "áàâäãåāăąạảấầẩậắ", "b": "ḃ", "c": "çćč", "d": "ďđḍ", "e": "éèêëēęěẹẻẽếềểệ", "g": "ğģ",
    "h": "ḥ", "i": "íìîïīıịỉ", "k": "ķḳ", "l": "łľḷ", "m": "ṃ", "n": "ñńňņṇ",
    "o": "óòôöõøőọỏốồổộớờợ",
    "r": "ŕřṛ", "s": "śšşṣ", "t": "ťţṭ", "u": "úùûüūůűụủứừựư", "w": "ŵẁ", "y": "ýÿỳỵỹ", "z": "źżžẓ",
}  # fmt: skip
_SCRIPTS = (
    (0x3B1, 0x3C9),  # Greek
    (0x430, 0x44F),  # Cyrillic
    (0x5D0, 0x5EA),  # Hebrew
    (0x905, 0x939),  # Devanagari
    (0x3042, 0x3093),  # Hiragana
    (0x4E00, 0x9FA5),  # Chinese
    (0xAC00, 0xD7A3),  # Hangul
    (0x1F400, 0x1F64F),  # pictures
)


def syllables(rng: random.Random, count: int) -> str:
    """A made-up lower-case word of ``count`` syllables."""
    return "".join(
        rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(count)
    )


def letters(rng: random.Random, fewest: int = 3, most: int = 12) -> str:
    """Lower-case letters, either all equally likely or about as in names."""
    source = _LETTERS if rng.random() < 0.4 else _COMMON
    return "".join(rng.choices(source, k=rng.randint(fewest, most)))


def accented(rng: random.Random, word: str) -> str:
    """The word with some of its letters under accents."""
    return "".join(
        rng.choice(_ACCENTS[c]) if c in _ACCENTS and rng.random() < 0.35 else c for c in word
    )


def broken(rng: random.Random, word: str) -> str:
    """The word with an apostrophe, a hyphen or a dot somewhere inside."""
    at = rng.randint(1, max(1, len(word) - 1))
    return word[:at] + rng.choice("''-.\u2019") + word[at:]


def foreign(rng: random.Random) -> str:
    """Two to six characters of one script other than Latin."""
    low, high = rng.choice(_SCRIPTS)
    return "".join(chr(rng.randint(low, high)) for _ in range(rng.randint(2, 6)))


def filled(rng: random.Random, pattern: str) -> str:
    """A pattern with its placeholders drawn.

    ``#`` is a digit, ``^`` an upper-case letter, ``@`` a lower-case one, ``%`` a hexadecimal digit
    and ``*`` a letter or digit; everything else stands for itself.
    """
    sources = {
        "#": "0123456789",
        "^": _LETTERS.upper(),
        "@": _LETTERS,
        "%": "0123456789abcdef",
        "*": _LETTERS + _LETTERS.upper() + "0123456789",
    }
    return "".join(rng.choice(sources[c]) if c in sources else c for c in pattern)


def random_pattern(rng: random.Random) -> str:
    """A pattern for `filled` of one to three groups, four to twelve characters in all."""
    groups = []
    for _ in range(rng.randint(1, 3)):
        groups.append(rng.choice("###^^@%*") * rng.randint(2, 4))
    return rng.choice(("", "-", "-", ".", "/", "_", " ")).join(groups)
