"""Every field that transformers knows is read, refused where it matters, or changes no logit.

The lists of fields come from transformers' source, so a version that adds one fails here until the
family's table says what the field is.
"""

import pytest
import transformers_fields
from field_cases import (
    ALLOWED,
    ARCHITECTURES,
    BASES,
    LLAMA,
    LONGROPE_LISTS,
    NOT_OF_A_FAMILY,
    REFUSED,
    SCORES,
    change_of,
    model_types,
)

from rjax import models
from rjax.models.families import FAMILIES, TEXT_FAMILIES
from rjax.models.families.rope_fields import INNER_ROPE_FIELDS


def read(values):
    return models.config_from_dict(values)


def test_there_is_a_config_of_every_family():
    assert sorted(TEXT_FAMILIES) == ARCHITECTURES


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_field_of_transformers_has_its_place(architecture):
    table = FAMILIES[architecture].fields
    known = transformers_fields.taken_from_keywords()
    for model_type in model_types(architecture):
        known |= transformers_fields.declared(model_type)
        known |= transformers_fields.looked_at(model_type)
    assert known - table.reads - table.constraints.keys() - table.ignores == set()
    assert {"per_layer_config", "is_causal", "rope_scaling", "head_dim"} <= known


def test_every_rotary_field_of_transformers_has_its_place():
    of_several_axes = {"mrope_section"}
    known = transformers_fields.rope_fields()
    assert known - INNER_ROPE_FIELDS == of_several_axes


@pytest.mark.parametrize(
    ("architecture", "field"),
    [
        (name, field)
        for name in ARCHITECTURES
        for field in sorted(FAMILIES[name].fields.reads - NOT_OF_A_FAMILY)
    ],
)
def test_a_field_that_is_read_changes_the_model(architecture, field):
    base, changed = change_of(architecture, field)
    assert read(changed) != read(base)


@pytest.mark.parametrize("quantization", [{"bits": 4}, {}, {"quant_method": "nobody"}, "int4"])
def test_weights_stored_in_an_unknown_scheme_are_refused(quantization):
    base = BASES["LlamaForCausalLM"]
    assert read(base | {"quantization_config": None}) == read(base)
    with pytest.raises(models.CheckpointError, match=r"quant_method .* not supported"):
        read(base | {"quantization_config": quantization})


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_architectures_choose_the_family(architecture):
    assert read(BASES[architecture]).architecture == architecture


@pytest.mark.parametrize(
    ("architecture", "field"),
    [
        (name, field)
        for name in ARCHITECTURES
        for field in sorted(FAMILIES[name].fields.constraints)
    ],
)
def test_a_constrained_field_is_refused_where_it_matters(architecture, field):
    base = BASES[architecture]
    own = model_types(architecture) if field == "model_type" else []
    null = [] if field == "is_causal" else [None]
    limit = [base["max_position_embeddings"]] if field == "sliding_window" else []
    scores = [SCORES.get(architecture, "sigmoid")] if field == "scoring_func" else []
    for value in ALLOWED[field] + own + null + limit + scores:
        assert read(base | {field: value}) == read(base)
    for value in REFUSED[field]:
        with pytest.raises(models.CheckpointError, match=rf"^config.json: {field} is .*; it must"):
            read(base | {field: value})


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_other_fields_change_nothing(architecture):
    base = BASES[architecture]
    unknown = {"unsloth_version", "task_specific_params"}
    for value in (None, 0, 3, True, 0.5, "text", [1], {"a": 1}):
        others = dict.fromkeys(FAMILIES[architecture].fields.ignores | unknown, value)
        assert read(base | others) == read(base), value


@pytest.mark.parametrize("kind", ["default", "dynamic", "linear", "llama3", "yarn"])
def test_rotary_fields_of_other_kinds_change_nothing(kind):
    scaling = {
        "rope_type": kind,
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 2048,
    }
    extra = {**LONGROPE_LISTS, "mrope_section": [2, 3, 3]}
    assert read(LLAMA | {"rope_scaling": scaling | extra}) == read(
        LLAMA | {"rope_scaling": scaling}
    )


def test_a_reader_cannot_look_at_what_its_table_does_not_have():
    fields = models.config_fields.ConfigFields({"a": 1, "b": 2}).only({"a"})
    assert fields.integer("a") == 1
    with pytest.raises(AssertionError, match="b is read undeclared"):
        fields.integer("b", None)
