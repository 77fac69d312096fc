"""The tables of fields hold to what changes transformers' logits.

``tests/golden/make_field_effects.py`` tries the fields with torch, and says what the groups are.
"""

import json
from pathlib import Path

import pytest
from field_cases import ARCHITECTURES, NOT_OF_A_FAMILY
from test_config_defaults import read, without

from rjax.models.families import FAMILIES

FILE = Path(__file__).parents[1] / "golden" / "field_effects.json"
EFFECTS = json.loads(FILE.read_text())["families"]
# They limit the length of sequences, and size tables that have no parameters.
LIMITS = {"max_position_embeddings", "seq_length"}
# Windows by default are longer than the sequences, and KV heads by default as many as the heads.
BEYOND_THE_MODELS = {"sliding_window", "num_key_value_heads"}
# transformers takes no other value: its model has the heads of a fixed size.
REFUSED = {("OlmoeForCausalLM", "head_dim"), ("Glm4MoeLiteForCausalLM", "num_attention_heads")}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_field_of_a_table_was_tried(architecture):
    table, found = FAMILIES[architecture].fields, EFFECTS[architecture]
    tried = {*found["changes"], *found["same"], *found["refused"]}
    known = table.reads | table.constraints.keys() | table.ignores
    assert known - tried == NOT_OF_A_FAMILY, "run tests/golden/make_field_effects.py"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_fields_that_are_read_change_the_logits(architecture):
    reads = FAMILIES[architecture].fields.reads - NOT_OF_A_FAMILY
    refused = {field for name, field in REFUSED if name == architecture}
    assert reads - set(EFFECTS[architecture]["changes"]) <= LIMITS | refused


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_fields_that_are_ignored_do_not(architecture):
    ignores = FAMILIES[architecture].fields.ignores
    assert ignores.isdisjoint(EFFECTS[architecture]["changes"])
    assert {*EFFECTS[architecture]["same"], "head_dim"} >= ignores


@pytest.mark.parametrize(
    ("architecture", "field"),
    [
        (name, field)
        for name in ARCHITECTURES
        for field in sorted(FAMILIES[name].fields.reads - NOT_OF_A_FAMILY)
        if field not in EFFECTS[name]["null_refused"]
    ],
)
def test_null_differs_from_a_missing_field_where_it_does_in_transformers(architecture, field):
    absent = without(architecture, field)
    differs = read(absent | {field: None}) != read(absent)
    if field not in BEYOND_THE_MODELS or not differs:
        assert differs == (field in EFFECTS[architecture]["null_differs"])
