"""How a family uses each field of config.json: read, constrained or ignored."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rjax.models.config import ModelConfig
from rjax.models.config_fields import ConfigFields
from rjax.models.families.rope_fields import ROPE_OBJECTS, unknown_rope_fields


@dataclasses.dataclass(frozen=True, slots=True)
class Constraint:
    """The allowed values of a field; with others the model would compute something else.

    Attributes:
        holds: (value, all fields) to whether the value is allowed.
        allowed: the allowed values and the reason; ends the sentence "it must be".
        null: whether null is allowed too.
        fits: (value, the config that was read) to the same, for a rule on several fields.
    """

    holds: Callable[[Any, ConfigFields], bool]
    allowed: str
    null: bool = True
    fits: Callable[[Any, ModelConfig], bool] | None = None


def one_of(*values: Any, why: str, null: bool = True) -> Constraint:
    """The field must be one of ``values``, of the same type: 1 is not true."""

    def holds(value: Any, _: ConfigFields) -> bool:
        return any(type(value) is type(one) and value == one for one in values)

    shown = " or ".join(str(one).lower() if isinstance(one, bool) else str(one) for one in values)
    return Constraint(holds, f"{shown}: {why}", null)


def absent(why: str) -> Constraint:
    """The field must be missing or null."""
    return Constraint(lambda *_: False, f"absent: {why}")


@dataclasses.dataclass(frozen=True, slots=True)
class FieldTable:
    """Every field that transformers' config class and model code of a family know.

    Fields in none of the three groups are unknown to transformers and have no effect there; a
    warning names them.

    Attributes:
        model_types: the values of ``model_type`` that transformers reads as this family.
        reads: the only fields that the reader of the family may read.
        constraints: fields that change the computation but are not read; values that the
            constraint does not allow are refused.
        ignores: fields that do not change the logits: training, generation, names and formats.
        rope_fields: fields of rotary embeddings that other families do not have.
    """

    model_types: frozenset[str]
    reads: frozenset[str]
    constraints: Mapping[str, Constraint]
    ignores: frozenset[str]
    rope_fields: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        groups = self.reads, self.constraints.keys(), self.ignores
        assert len(frozenset().union(*groups)) == sum(map(len, groups)), "a field is in two groups"

    @property
    def names(self) -> frozenset[str]:
        """The names of all fields of the table."""
        return self.reads | self.ignores | frozenset(self.constraints)

    def check(self, fields: ConfigFields) -> ConfigFields:
        """The fields, restricted to those in ``reads``.

        Raises CheckpointError for a value that its constraint does not allow.
        """
        for name, constraint in self.constraints.items():
            if not fields.given(name):
                continue
            value = fields.raw(name)
            if not (constraint.null if value is None else constraint.holds(value, fields)):
                fields.refuse(name, constraint.allowed)
        return fields.only(self.reads)

    def unknown(self, fields: ConfigFields) -> list[str]:
        """Names of the fields that neither rjax nor transformers knows, sorted."""
        names = fields.names() - self.names
        if self.reads >= ROPE_OBJECTS:
            names |= unknown_rope_fields(fields, self.rope_fields)
        return sorted(names)

    def check_config(self, fields: ConfigFields, config: ModelConfig) -> None:
        """Check the constraints that depend on what the fields mean together.

        Raises CheckpointError as ``check`` does.
        """
        for name, constraint in self.constraints.items():
            value = fields.raw(name)
            if constraint.fits and value is not None and not constraint.fits(value, config):
                fields.refuse(name, constraint.allowed)


NO_WINDOWS: Mapping[str, Constraint] = {
    # These families do not declare them, but the KV cache of transformers applies them.
    "sliding_window": Constraint(
        lambda value, _: type(value) is int,
        "null or at least the longest sequence: this architecture has no sliding window",
        fits=lambda value, config: value >= config.longest_sequence,
    ),
    "layer_types": Constraint(
        lambda value, _: isinstance(value, list) and set(map(str, value)) <= {"full_attention"},
        "full_attention for each layer: this architecture has no sliding window",
    ),
}
"""Constraints of families with full causal attention."""


HEAD_DIM_OF_SIZE: Mapping[str, Constraint] = {
    "head_dim": Constraint(
        lambda value, _: type(value) is int,
        "hidden_size / num_attention_heads: this architecture has no other",
        fits=lambda value, config: value == config.head_dim,
    )
}
"""Constraint of families whose heads divide the hidden size."""


def _same_layers(kinds: Any, fields: ConfigFields) -> bool:
    kind = "sliding_attention" if fields.has("sliding_window") else "full_attention"
    return isinstance(kinds, list) and all(one == kind for one in kinds)


UNIFORM_LAYERS: Mapping[str, Constraint] = {
    "layer_types": Constraint(
        _same_layers,
        "sliding_attention for each layer with a sliding_window, full_attention without: "
        "this architecture has one kind of layers",
    )
}
"""Constraint of families with the same window on every layer."""

_EVERYWHERE: Mapping[str, Constraint] = {
    "is_causal": one_of(True, why="a token sees no later token", null=False),
    "per_layer_config": Constraint(
        lambda value, _: value == {}, "empty: settings of single layers are not supported"
    ),
    "attention_chunk_size": absent("chunked attention is not supported"),
    "kv_sharing_modes": absent("layers that share keys and values are not supported"),
    "transformers_weights": absent("weights are read from *.safetensors under their usual names"),
}

_IGNORED = frozenset(
    {
        # Names, formats and versions.
        "_commit_hash",
        "_name_or_path",
        "auto_map",
        "name_or_path",
        "transformers_version",
        # Formats of the output, and implementations that compute the same.
        "_attn_implementation",
        "attn_implementation",
        "chunk_size_feed_forward",
        "experts_implementation",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "tie_last_hidden_states",
        "use_cache",
        # For other kinds of models or heads.
        "id2label",
        "is_encoder_decoder",
        "label2id",
        "num_labels",
        "number_of_conv_states",
        "problem_type",
        # Special tokens: read with the tokenizer.
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        # Training.
        "attention_dropout",
    }
)


def field_table(
    model_types: Iterable[str],
    reads: Iterable[str],
    constraints: Mapping[str, Constraint] | None = None,
    ignores: Iterable[str] = (),
    rope_fields: Iterable[str] = (),
) -> FieldTable:
    """The table of a family, with the entries that all families have in common.

    ``model_types`` are the allowed values of ``model_type``: transformers chooses the model by it,
    not by ``architectures``.
    """
    model_types, reads = tuple(model_types), frozenset(reads)
    everywhere = {name: rule for name, rule in _EVERYWHERE.items() if name not in reads}
    model_type = one_of(*model_types, why="any other contradicts architectures")
    return FieldTable(
        model_types=frozenset(model_types),
        reads=reads | {"architectures", "dtype", "quantization_config", "torch_dtype"},
        constraints={"model_type": model_type, **everywhere, **(constraints or {})},
        ignores=_IGNORED | frozenset(ignores),
        rope_fields=frozenset(rope_fields),
    )
