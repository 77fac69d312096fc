"""Rotary settings as config.json spells them, old and new."""

import math

from models.config_fields import ConfigFields
from models.errors import CheckpointError
from models.rope import RopeConfig

_MAX_THETA = 1e30  # far above any model's; float32 ends at 3e38
_KINDS = ("default", "linear", "llama3", "yarn")


def read_rope(
    fields: ConfigFields, head_dim: int, max_position: int, partial: bool = False
) -> RopeConfig:
    """From ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (before).

    ``partial`` says whether the family may rotate only some of the dims.

    Raises CheckpointError for scalings whose tables change with the sequence length.
    """
    name = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    rope = fields.inner(name)
    kind = rope.raw("rope_type") or rope.raw("type") or "default"
    if kind not in _KINDS:
        raise CheckpointError(
            f"config.json: {name} has the type {kind!r}; supported are {', '.join(_KINDS)}. "
            "Types such as dynamic and longrope change the angles of earlier tokens as a sequence "
            "grows, which no stored key can follow"
        )
    theta = rope.number("rope_theta", None) or fields.number("rope_theta", 10000.0)
    if not 1 < theta <= _MAX_THETA:
        raise CheckpointError(
            f"config.json: rope_theta is {theta}; it must be above 1 and at most {_MAX_THETA:g}"
        )
    part = rope.number("partial_rotary_factor", None) or fields.number("partial_rotary_factor", 1.0)
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
    original = rope.integer("original_max_position_embeddings", None)
    original = original or fields.integer("original_max_position_embeddings", max_position)
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
        truncate=rope.flag("truncate", True),
        attention_factor=_yarn_attention_factor(rope, factor),
    )


def _yarn_attention_factor(rope: ConfigFields, factor: float) -> float:
    """Explicit, or from the stretch (Peng et al., 2023, section 3.4)."""
    if rope.has("attention_factor"):
        return rope.number("attention_factor")

    def grown(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if rope.raw("mscale") and rope.raw("mscale_all_dim"):
        return grown(rope.number("mscale")) / grown(rope.number("mscale_all_dim"))
    return grown(1.0)
