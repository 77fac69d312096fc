"""The columns a table may have, and random values for them.

Values never hold a pipe or a newline. A table writes all values of a column in one format, which it
draws first; most tables use the plain formats (ids of four digits, ages of two).
"""

import dataclasses
import random
import unicodedata
from collections.abc import Callable

from bench.train_bundled_model.strings import (
    accented,
    broken,
    filled,
    foreign,
    letters,
    random_pattern,
    syllables,
)
from bench.train_bundled_model.words import Pool, is_held_out, pool, words

COLUMNS = ("id", "name", "age", "occupation", "country", "email", "phone", "address")
EXTRA_COLUMNS = ("city", "department", "salary", "code")
COUNTED = ("country", "occupation", "city", "department")  # columns with repeated values

_CALLING_CODES = words("calling_codes")
_ENDINGS = words("domain_endings")
_KINDS = words("street_kinds")

_IDS = (
    "####", "####", "####", "n", "###", "#####", "######", "########", "^-####", "^^^####", "^#^#",
    "%%%%%%%%", "20##-###", "^^-##-##", "@@###", "EMP###", "####-##", "%%%%-%%%%",
)  # fmt: skip
_PHONES = (
    "+~ ### ####", "+~ ### ####", "+~ ### ####", "(###) ###-####", "###-####", "0### ######",
    "+~ ## ### ## ##", "+~##########", "###.###.####", "1-###-###-####",
)  # fmt: skip
_SALARIES = ("##,#00", "$##,#00", "###00", "#### EUR", "€#,###", "##k")
_ADDRESSES = (
    "{number} {street} {kind}",
    "{number} {street} {kind}",
    "{number} {street} {kind}",
    "{street} {kind} {number}",
    "{number}{letter} {street} {kind}",
    "{number} {street} {kind}, Apt {flat}",
    "{number} {street} {kind}, {city}",
    "{street} {number}, {code} {city}",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Formats:
    """How one table writes its columns.

    Attributes:
        which: pool of its words.
        id, phone, salary, code: patterns of `filled`; ``n`` is a running number, ``~`` a calling
            code, and an empty code is a word of any kind.
        address: template.
        ages: youngest and oldest age.
        odd: share of words that are in no list.
        values: the few values that occur in each of the columns `COUNTED`.
    """

    which: Pool
    id: str
    phone: str
    salary: str
    code: str
    address: str
    ages: tuple[int, int]
    odd: float
    values: dict[str, tuple[str, ...]]


_LIST_OF = {
    "country": "countries",
    "occupation": "occupations",
    "city": "cities",
    "department": "departments",
}


def random_formats(rng: random.Random, which: Pool) -> Formats:
    """The formats of one table; of real values, the plain ones."""
    if which == "real":
        plain = Formats(
            which, _IDS[0], _PHONES[0], _SALARIES[0], "^^-####", _ADDRESSES[0], (18, 89), 0.0, {}
        )
        return dataclasses.replace(plain, values=_values(rng, plain))
    drawn = Formats(
        which,
        id=rng.choice(_IDS),
        phone=rng.choice(_PHONES),
        salary=rng.choice(_SALARIES),
        code=random_pattern(rng) if rng.random() < 0.7 else "",
        address=rng.choice(_ADDRESSES),
        ages=(18, 89) if rng.random() < 0.85 else (0, 105),
        odd=rng.choice((0.0, 0.2, 0.5)),
        values={},
    )
    return dataclasses.replace(drawn, values=_values(rng, drawn))


def _values(rng: random.Random, formats: Formats) -> dict[str, tuple[str, ...]]:
    """Few distinct values a table, so that counting finds more than one."""
    values = {}
    for column in COUNTED:
        count = rng.randint(3, min(20, len(pool(_LIST_OF[column], formats.which))))
        found: dict[str, None] = {}
        while len(found) < count:
            found.setdefault(_value(rng, column, formats))
        values[column] = tuple(found)
    return values


def _odd_word(rng: random.Random, which: Pool) -> str:
    """A lower-case word of any kind that belongs to the pool."""
    while True:
        draw = rng.random()
        if draw < 0.4:
            return rng.choice(pool("english", which))
        if draw < 0.7:
            word = syllables(rng, rng.randint(1, 3))
        elif draw < 0.97:
            word = letters(rng)
        else:
            word = foreign(rng)
        if rng.random() < 0.1:
            word = rng.choice((broken, accented))(rng, word)
        if len(word) > 1 and is_held_out(word) == (which != "training"):
            return word


def _value(rng: random.Random, column: str, formats: Formats) -> str:
    if rng.random() >= formats.odd:
        return rng.choice(pool(_LIST_OF[column], formats.which))
    words = [_odd_word(rng, formats.which) for _ in range(rng.choices((1, 2, 3), (6, 3, 1))[0])]
    if column != "occupation":
        words = [word.capitalize() for word in words]
    # Small words that questions and answers have too must not end a value.
    return rng.choice((" ", " ", " ", " and ", " of ", " & ")).join(words)


def _digits(rng: random.Random, count: int) -> str:
    return str(rng.randrange(10**count)).zfill(count)


def random_id(rng: random.Random, formats: Formats, row: int) -> str:
    """An id in the table's format; a plain one does not start with 0."""
    if formats.id == "n":
        return str(row + 1)
    if formats.id == "####":
        return str(rng.randrange(1000, 10000))
    return filled(rng, formats.id)


def random_age(rng: random.Random, formats: Formats) -> str:
    """An age in years."""
    return str(rng.randint(*formats.ages))


def random_phone(rng: random.Random, formats: Formats) -> str:
    """A phone number."""
    return filled(rng, formats.phone.replace("~", rng.choice(_CALLING_CODES)))


def random_salary(rng: random.Random, formats: Formats) -> str:
    """A salary that does not start with 0."""
    pattern = formats.salary
    at = pattern.index("#")
    return filled(rng, f"{pattern[:at]}{rng.randint(1, 9)}{pattern[at + 1 :]}")


def random_code(rng: random.Random, formats: Formats) -> str:
    """A code in the table's pattern, or a word of any kind."""
    return filled(rng, formats.code) if formats.code else _odd_word(rng, formats.which)


def random_address(rng: random.Random, formats: Formats) -> str:
    """A street address."""
    draw = rng.random()
    if draw < 0.6 or formats.which == "real":
        street = rng.choice(pool("streets", formats.which))
    elif draw < 0.8:
        street = rng.choice(pool("surnames", formats.which))
    else:
        street = _odd_word(rng, formats.which).title()
    return formats.address.format(
        number=rng.randrange(1, 200) if rng.random() < 0.8 else rng.randrange(1, 10000),
        letter=rng.choice("ABCD"),
        flat=rng.randrange(1, 60),
        street=street,
        kind=rng.choice(_KINDS),
        code=_digits(rng, 5),
        city=rng.choice(pool("cities", formats.which)),
    )


def _folded(text: str) -> str:
    ascii_only = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    return "".join(c for c in ascii_only if c.isalnum())


def random_email(rng: random.Random, formats: Formats, first: str, last: str) -> str:
    """An address that often, but not always, follows from the name."""
    first, last = _folded(first), _folded(last)
    draw = rng.random()
    word = _folded(_odd_word(rng, formats.which)) or _digits(rng, 6)
    if draw > 0.7 or not first or not last:
        user = word + (_digits(rng, rng.randint(1, 4)) if rng.random() < 0.5 else "")
    elif draw < 0.35:
        user = f"{first}.{last}"
    elif draw < 0.5:
        user = f"{first[0]}.{last}"
    elif draw < 0.6:
        user = f"{first}{rng.choice(('_', '-', ''))}{last[0]}"
    else:
        user = f"{last}{_digits(rng, 2)}"
    domain = rng.choice(pool("domains", formats.which))
    if rng.random() < max(0.3, formats.odd) and formats.which != "real":
        domain = _folded(_odd_word(rng, formats.which)) or domain
    return f"{user}@{domain}.{rng.choice(_ENDINGS)}"


def random_row(
    rng: random.Random, formats: Formats, row: int, first: str, last: str
) -> dict[str, str]:
    """A value for every column, of one person."""
    made: dict[str, Callable[[random.Random, Formats], str]] = {
        "age": random_age,
        "phone": random_phone,
        "address": random_address,
        "salary": random_salary,
        "code": random_code,
    }
    cells = {column: make(rng, formats) for column, make in made.items()}
    cells |= {column: rng.choice(formats.values[column]) for column in COUNTED}
    return cells | {
        "id": random_id(rng, formats, row),
        "name": f"{first} {last}",
        "email": random_email(rng, formats, first, last),
    }
