"""Every family of ``golden/families``: logits and greedy tokens equal transformers'."""

import json
from pathlib import Path

import pytest
from golden import compare

from rjax import models
from rjax.models.families import FAMILIES

GOLDENS = Path(__file__).parent.parent / "golden"
CASES = sorted(json.loads((GOLDENS / "families" / "cases.json").read_text()))


@pytest.mark.parametrize("name", CASES)
def test_equals_goldens(name):
    compare(GOLDENS / "families", name)


def test_goldens_are_small_and_say_who_made_them():
    folder = GOLDENS / "families"
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    assert sum(sizes) <= 10_000_000
    assert {"torch", "transformers"} <= json.loads((folder / "versions.json").read_text()).keys()


def test_every_family_has_goldens():
    places = (GOLDENS, GOLDENS / "families", GOLDENS / "experts")
    folders = [folder for place in places for folder in (place / "models").iterdir()]
    assert {models.config_from_folder(folder).architecture for folder in folders} == set(FAMILIES)
