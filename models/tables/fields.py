"""The columns a table may have, and random values for them.

Values never hold a pipe or a newline, and each column's values look like no other column's: ids
have four digits, ages two.
"""

import random
import unicodedata

from models.tables.names import syllables

COLUMNS = ("id", "name", "age", "occupation", "country", "email", "phone", "address")

COUNTRIES = [
    "Argentina",
    "Australia",
    "Austria",
    "Belgium",
    "Brazil",
    "Canada",
    "Chile",
    "China",
    "Colombia",
    "Croatia",
    "Denmark",
    "Egypt",
    "Estonia",
    "Finland",
    "France",
    "Germany",
    "Ghana",
    "Greece",
    "Hungary",
    "Iceland",
    "India",
    "Indonesia",
    "Ireland",
    "Israel",
    "Italy",
    "Japan",
    "Kenya",
    "Latvia",
    "Malaysia",
    "Mexico",
    "Morocco",
    "Nepal",
    "Nigeria",
    "Norway",
    "Peru",
    "Poland",
    "Portugal",
    "Romania",
    "Senegal",
    "Serbia",
    "Singapore",
    "Spain",
    "Sweden",
    "Switzerland",
    "Thailand",
    "Tunisia",
    "Turkey",
    "Uganda",
    "Uruguay",
    "Vietnam",
] + ["New Zealand", "South Africa", "South Korea", "Costa Rica"]

OCCUPATIONS = [
    "accountant",
    "actor",
    "architect",
    "astronomer",
    "baker",
    "barber",
    "biologist",
    "bookbinder",
    "botanist",
    "butcher",
    "carpenter",
    "chemist",
    "composer",
    "cook",
    "courier",
    "dancer",
    "dentist",
    "designer",
    "diver",
    "doctor",
    "economist",
    "editor",
    "electrician",
    "engineer",
    "farmer",
    "firefighter",
    "fisher",
    "florist",
    "forester",
    "gardener",
    "geologist",
    "glazier",
    "historian",
    "illustrator",
    "interpreter",
    "jeweller",
    "journalist",
    "judge",
    "lawyer",
    "librarian",
    "locksmith",
    "mechanic",
    "midwife",
    "miner",
    "musician",
    "nurse",
    "optician",
    "painter",
    "pharmacist",
    "photographer",
    "physicist",
    "pilot",
    "plumber",
    "potter",
    "printer",
    "programmer",
    "sailor",
    "sculptor",
    "surgeon",
    "surveyor",
    "tailor",
    "teacher",
    "translator",
    "vet",
    "watchmaker",
    "weaver",
    "welder",
    "writer",
    "zoologist",
]

_STREETS = [
    "Alder",
    "Amber",
    "Ash",
    "Bay",
    "Beech",
    "Birch",
    "Bridge",
    "Castle",
    "Cedar",
    "Chapel",
    "Cherry",
    "Church",
    "Clover",
    "Cliff",
    "Coral",
    "Dale",
    "Dove",
    "Elm",
    "Fern",
    "Field",
    "Forest",
    "Garden",
    "Glen",
    "Grove",
    "Harbour",
    "Hazel",
    "Heath",
    "Hill",
    "Holly",
    "Ivy",
    "Juniper",
    "Lake",
    "Laurel",
    "Lime",
    "Linden",
    "Maple",
    "Market",
    "Meadow",
    "Mill",
    "Moss",
    "Oak",
    "Olive",
    "Orchard",
    "Park",
    "Pine",
    "Poplar",
    "Quarry",
    "Raven",
    "River",
    "Rose",
    "Rowan",
    "School",
    "Spring",
    "Station",
    "Stone",
    "Sunset",
    "Temple",
    "Valley",
    "Violet",
    "Willow",
    "Winter",
]
_STREET_KINDS = [
    "Street",
    "Road",
    "Lane",
    "Avenue",
    "Way",
    "Square",
    "Court",
    "Drive",
    "Close",
    "Terrace",
]
_DOMAINS = [
    "mailbox",
    "postbox",
    "inkwell",
    "lantern",
    "harbour",
    "orchard",
    "meadow",
    "copper",
    "silver",
    "granite",
    "willow",
    "northwind",
    "papermill",
    "bluebird",
    "kestrel",
    "lighthouse",
]
_ENDINGS = ["com", "org", "net", "io", "eu", "info", "de", "fr", "uk", "nl", "se", "jp"]
_CODES = "1 20 27 30 31 32 33 34 36 39 41 44 45 46 47 48 49 51 52 54 55 56 61 64 65 81 82 84 90 91"
_CALLING_CODES = _CODES.split()


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
