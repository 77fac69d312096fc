"""The columns a table may have, and random values for them.

Values never hold a pipe or a newline, and each column's values look like no other column's: ids
have four digits, ages two.
"""

import random
import unicodedata

from models.tables.names import syllables
from models.tables.words import words

COLUMNS = ("id", "name", "age", "occupation", "country", "email", "phone", "address")

COUNTRIES = words("countries")

OCCUPATIONS = words("occupations")

_STREETS = words("streets")
_STREET_KINDS = words("street_kinds")
_DOMAINS = words("domains")
_ENDINGS = words("domain_endings")
_CALLING_CODES = words("calling_codes")


def _digits(rng: random.Random, count: int) -> str:
    return str(rng.randrange(10**count)).zfill(count)


def random_id(rng: random.Random) -> str:
    """Four digits, not starting with 0."""
    return str(rng.randrange(1000, 10000))


def random_age(rng: random.Random) -> str:
    """Two digits: 18 to 89."""
    return str(rng.randrange(18, 90))


def random_phone(rng: random.Random) -> str:
    """A plus, a calling code, three digits and four digits."""
    return f"+{rng.choice(_CALLING_CODES)} {_digits(rng, 3)} {_digits(rng, 4)}"


def random_address(rng: random.Random) -> str:
    """House number, street and kind of street."""
    street = rng.choice(_STREETS) if rng.random() < 0.8 else syllables(rng, 2).capitalize()
    return f"{rng.randrange(1, 200)} {street} {rng.choice(_STREET_KINDS)}"


def random_email(rng: random.Random, first: str, last: str) -> str:
    """An address that often, but not always, follows from the name."""
    first, last = (
        unicodedata.normalize("NFKD", part).encode("ascii", "ignore").decode().lower()
        for part in (first, last)
    )
    draw = rng.random()
    if draw < 0.4:
        user = f"{first}.{last}"
    elif draw < 0.55:
        user = f"{first[0]}.{last}"
    elif draw < 0.7:
        user = f"{last}{_digits(rng, 2)}"
    else:
        user = syllables(rng, 2) + (_digits(rng, 2) if rng.random() < 0.5 else "")
    domain = rng.choice(_DOMAINS) if rng.random() < 0.7 else syllables(rng, 2)
    return f"{user}@{domain}.{rng.choice(_ENDINGS)}"
