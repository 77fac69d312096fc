"""Rotary embedding settings in config.json, in old and new formats."""

import math
from collections.abc import Collection

from rjax.models.config_fields import ConfigFields
from rjax.models.errors import CheckpointError
from rjax.models.rope import RopeConfig, RopeKind

ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3", "yarn")
ROPE_FIELDS = frozenset(
    {"original_max_position_embeddings", "rope_parameters", "rope_scaling", "rope_theta"}
)
"""Fields of config.json that `read_rope` reads, besides partial_rotary_factor if allowed."""
INNER_ROPE_FIELDS = frozenset(
    {
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "factor",
        "high_freq_factor",
        "low_freq_factor",
        "mscale",
        "mscale_all_dim",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "rope_theta",
        "rope_type",
        "truncate",
        "type",
    }
)
"""Fields of rope_parameters and rope_scaling that `read_rope` reads.

The other fields of transformers belong to refused kinds (short_factor, long_factor) or to several
position axes (mrope_section), which are equal for text.
"""


def read_rope(
    fields: ConfigFields,
    head_dim: int,
    max_position: int,
    partial: bool = False,
    kinds: Collection[RopeKind] = ROPE_KINDS,
) -> RopeConfig:
    """Read ``rope_parameters`` (transformers 5), or ``rope_theta`` and ``rope_scaling`` (older).

    The precedence of fields that occur twice is that of transformers: ``rope_scaling`` before
    ``rope_parameters``, ``rope_theta`` and ``partial_rotary_factor`` from the inner object first,
    ``original_max_position_embeddings`` from the outer one first.

    ``partial`` says whether the family allows partial rotary embedding; ``kinds`` are the allowed
    types of scaling.

    Raises CheckpointError for scalings that depend on the sequence length or differ between layers.
    """
    name = "rope_scaling" if fields.inner("rope_scaling").names() else "rope_parameters"
    rope = fields.inner(name)
    for key in rope.names():
        if isinstance(rope.raw(key), dict):
            raise CheckpointError(
                f"config.json: {name} has a separate object for {key!r:.50}; only one rotary "
                "embedding for all layers is supported"
            )
    rope = rope.only(INNER_ROPE_FIELDS)
    kind = next((rope.raw(key) for key in ("rope_type", "type") if rope.has(key)), "default")
    if kind not in kinds:
        raise CheckpointError(
            f"config.json: {name} has the type {kind!r:.200}; supported are {', '.join(kinds)}. "
            "Types such as dynamic and longrope change the angles of earlier tokens as a sequence "
            "grows, which is not possible with cached keys"
        )
    theta = rope.number("rope_theta", None) or fields.number("rope_theta", 10000.0)
    if theta <= 1:
        raise CheckpointError(f"config.json: rope_theta is {theta}; it must be above 1")
    part = rope.number("partial_rotary_factor", None)
    if part is None:
        part = fields.number("partial_rotary_factor", 1.0) if partial else 1.0
    if part != 1 and not partial:
        raise CheckpointError(
            f"config.json: partial_rotary_factor is {part}; this architecture rotates every dim"
        )
    rotary_dim = int(head_dim * part)
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        raise CheckpointError(
            f"config.json: head_dim {head_dim} with partial_rotary_factor {part} rotates "
            f"{rotary_dim} dims; it must be an even number from 2 to {head_dim}"
        )
    if kind == "default":
        return RopeConfig("default", theta, rotary_dim)
    if kind == "linear":
        return RopeConfig("linear", theta, rotary_dim, factor=rope.number("factor"))
    original = fields.integer("original_max_position_embeddings", None)
    original = original or rope.integer("original_max_position_embeddings", max_position)
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if low >= high:
            raise CheckpointError(
                f"config.json: {name} has low_freq_factor {low} and high_freq_factor {high}; "
                "the low one must be below the high one"
            )
        return RopeConfig(
            "llama3",
            theta,
            rotary_dim,
            factor=rope.number("factor"),
            original_max_position=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    factor = rope.number("factor", None) or max_position / original
    return RopeConfig(
        "yarn",
        theta,
        rotary_dim,
        factor=factor,
        original_max_position=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", not rope.given("truncate")),  # null counts as false
        attention_factor=_yarn_attention_factor(rope, factor),
    )


def _yarn_attention_factor(rope: ConfigFields, factor: float) -> float:
    """The given factor, or one that follows from ``factor`` (Peng et al., 2023, section 3.4)."""
    if rope.has("attention_factor"):
        return rope.number("attention_factor")

    def scaled(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if rope.raw("mscale") and rope.raw("mscale_all_dim"):
        return scaled(rope.number("mscale")) / scaled(rope.number("mscale_all_dim"))
    return scaled(1.0)
