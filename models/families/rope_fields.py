"""Rotary embedding settings in config.json, in old and new formats."""

import dataclasses
import math
from collections.abc import Mapping, Set

from rjax.models.config_fields import ConfigFields
from rjax.models.errors import CheckpointError
from rjax.models.rope import RopeConfig, RopeKind

ROPE_KINDS: tuple[RopeKind, ...] = ("default", "dynamic", "linear", "llama3", "longrope", "yarn")
ROPE_FIELDS = frozenset(
    {"original_max_position_embeddings", "rope_parameters", "rope_scaling", "rope_theta"}
)
"""Fields of config.json that `read_rope` reads, besides partial_rotary_factor if allowed."""
OUTER_ROPE_FIELDS = frozenset({"original_max_position_embeddings"})
"""The `ROPE_FIELDS` that families with a rotary embedding for each type of layer ignore."""
INNER_ROPE_FIELDS = frozenset(
    {
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "factor",
        "high_freq_factor",
        "llama_4_scaling_beta",
        "long_factor",
        "low_freq_factor",
        "mscale",
        "mscale_all_dim",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "rope_theta",
        "rope_type",
        "short_factor",
        "truncate",
        "type",
    }
)
"""Fields of rope_parameters and rope_scaling that `read_rope` reads."""
# The dims of each axis of positions, and their order. The positions of text are equal on all axes.
_SEVERAL_AXES = frozenset({"mrope_interleaved", "mrope_section"})
ROPE_OBJECTS = frozenset({"rope_parameters", "rope_scaling"})
"""The objects with the settings of a rotary embedding, or with one for each type of layer."""


@dataclasses.dataclass(frozen=True, slots=True)
class RopeRules:
    """What the rotary embedding of a family may be.

    Attributes:
        kinds: the allowed types of scaling.
        theta: the family's default in transformers.
        partial: whether partial_rotary_factor may differ from 1.
        part: default of partial_rotary_factor.
        interleaved: the rotated pairs are neighbours, x[2i] and x[2i + 1].
        aliases: other names of types in checkpoints of the family.
        original: default of the outer original_max_position_embeddings.
        scales_queries: whether llama_4_scaling_beta applies.
        stretches_base: ``alpha`` of the type dynamic multiplies the base, whatever the length, by
            alpha ** (dims / (dims - 2)) (HunYuan).
    """

    kinds: tuple[RopeKind, ...] = ROPE_KINDS
    theta: float = 10000.0
    partial: bool = False
    part: float = 1.0
    interleaved: bool = False
    aliases: tuple[tuple[str, RopeKind], ...] = ()
    original: int | None = None
    scales_queries: bool = False
    stretches_base: bool = False


def read_rope(
    fields: ConfigFields, head_dim: int, max_position: int, rules: RopeRules
) -> RopeConfig:
    """Read ``rope_parameters`` (transformers 5), or ``rope_theta`` and ``rope_scaling`` (older).

    The precedence of fields that occur twice is that of transformers: ``rope_scaling`` before
    ``rope_parameters``, ``rope_theta`` and ``partial_rotary_factor`` from the inner object first,
    ``original_max_position_embeddings`` from the outer one first.

    Raises CheckpointError for types of scaling that the family does not have, and for settings that
    differ between layers.
    """
    name = rope_object(fields)
    rope = fields.inner(name)
    for key in rope.names():
        if isinstance(rope.raw(key), dict):
            raise CheckpointError(
                f"config.json: {name} has a separate object for {key!r:.50}; only one rotary "
                "embedding for all layers is supported"
            )
    theta = fields.number("rope_theta", rules.theta)
    part = 1.0
    if rules.partial:  # null means all dims, a missing field the default
        default = 1.0 if fields.given("partial_rotary_factor") else rules.part
        part = fields.number("partial_rotary_factor", default)
    original = fields.integer("original_max_position_embeddings", rules.original)
    rules = dataclasses.replace(rules, theta=theta, part=part)
    return parse_rope(rope, name, head_dim, max_position, rules, original)


def rope_object(fields: ConfigFields) -> str:
    """Name of the object with the settings of a rotary embedding for all layers."""
    return "rope_scaling" if fields.inner("rope_scaling").names() else "rope_parameters"


def unknown_rope_fields(fields: ConfigFields, own: Set[str] = frozenset()) -> set[str]:
    """Fields inside the `ROPE_OBJECTS` that neither rjax nor transformers knows.

    ``own`` are those that only the family has.
    """
    known = INNER_ROPE_FIELDS | _SEVERAL_AXES | own
    unknown = set()
    for name in ROPE_OBJECTS:
        for key, value in fields.inner(name).values().items():
            if isinstance(value, dict):
                unknown |= {f"{name}.{key}.{inner}" for inner in value.keys() - known}
            elif key not in known:
                unknown.add(f"{name}.{key}")
    return unknown


def read_layer_ropes(
    fields: ConfigFields, head_dim: int, max_position: int, thetas: Mapping[str, float]
) -> dict[str, RopeConfig]:
    """The rotary embedding of each type of layer (Gemma 3, OLMo 3).

    ``rope_parameters`` has an object for each type; ``rope_scaling`` of older checkpoints is that
    of the layers with full attention. ``thetas`` has the default for each type.
    """
    by_type = fields.inner("rope_parameters")
    if by_type.names() - thetas.keys():
        fields.refuse("rope_parameters", f"objects for {' and '.join(thetas)}")
    found = {}
    for kind, theta in thetas.items():
        name = "rope_parameters"
        values = by_type.inner(kind).values()
        if kind == "full_attention" and fields.inner("rope_scaling").names():
            name, values = "rope_scaling", values | fields.inner("rope_scaling").values()
        rope = ConfigFields(values, f"config.json: {name}")
        found[kind] = parse_rope(rope, name, head_dim, max_position, RopeRules(theta=theta), None)
    return found


def parse_rope(
    rope: ConfigFields,
    name: str,
    head_dim: int,
    max_position: int,
    rules: RopeRules,
    original: int | None,
) -> RopeConfig:
    """The rotary embedding from one object.

    Args:
        rope: the fields of the object.
        name: name of the object, for errors.
        head_dim, max_position: the model's dims of a head, and its ``max_position_embeddings``.
        rules: the family's rules, with the values outside the object as defaults.
        original: ``original_max_position_embeddings`` outside the object, which comes first.
    """
    found = _parse_rope(rope, name, head_dim, max_position, rules, original)
    found = dataclasses.replace(found, interleaved=rules.interleaved)
    if not rules.scales_queries or not rope.has("llama_4_scaling_beta"):
        return found
    period = found.original_max_position or rope.integer("original_max_position_embeddings")
    beta = rope.number("llama_4_scaling_beta")
    return dataclasses.replace(found, original_max_position=period, query_scale_beta=beta)


def _parse_rope(
    rope: ConfigFields,
    name: str,
    head_dim: int,
    max_position: int,
    rules: RopeRules,
    original: int | None,
) -> RopeConfig:
    alpha = rope.number("alpha", None) if rules.stretches_base and rope.raw("alpha") else None
    rope = rope.only(INNER_ROPE_FIELDS)
    kind = next((rope.raw(key) for key in ("rope_type", "type") if rope.has(key)), "default")
    if isinstance(kind, str):
        kind = dict(rules.aliases).get(kind, kind)
    if kind not in rules.kinds:
        raise CheckpointError(
            f"config.json: {name} has the type {kind!r:.200}; supported are "
            f"{', '.join(rules.kinds)}"
        )
    theta = rope.number("rope_theta", None) or rules.theta
    if theta <= 1:
        raise CheckpointError(f"config.json: rope_theta is {theta}; it must be above 1")
    part = rope.number("partial_rotary_factor", None)
    if part is None:
        part = rules.part
    if part != 1 and not rules.partial:
        raise CheckpointError(
            f"config.json: partial_rotary_factor is {part}; this architecture rotates every dim"
        )
    rotary_dim = int(head_dim * part)
    if kind == "proportional" and not 0 < part <= 1:
        raise CheckpointError(
            f"config.json: partial_rotary_factor is {part}; it must be above 0 and at most 1"
        )
    if kind != "proportional" and (rotary_dim % 2 or not 2 <= rotary_dim <= head_dim):
        raise CheckpointError(
            f"config.json: head_dim {head_dim} with partial_rotary_factor {part} rotates "
            f"{rotary_dim} dims; it must be an even number from 2 to {head_dim}"
        )
    if kind == "dynamic" and rules.stretches_base and alpha:
        theta *= float(alpha) ** (rotary_dim / (rotary_dim - 2))
        kind = "default"
    if kind == "default":
        return RopeConfig("default", theta, rotary_dim)
    if kind == "proportional":
        return RopeConfig(
            "proportional",
            theta,
            head_dim,
            factor=rope.number("factor", 1.0),
            rotated_pairs=int(head_dim * part // 2),
        )
    if kind == "linear":
        return RopeConfig("linear", theta, rotary_dim, factor=rope.number("factor"))
    if kind == "dynamic":
        if rotary_dim < 4:
            raise CheckpointError(f"config.json: {name} of type dynamic needs 4 rotated dims")
        factor = rope.number("factor")
        return RopeConfig(
            "dynamic",
            theta,
            rotary_dim,
            factor=factor,
            original_max_position=max_position,
            max_length=max_position,
        )
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
    if kind == "longrope":
        return RopeConfig(
            "longrope",
            theta,
            rotary_dim,
            factor=factor,
            original_max_position=original,
            attention_factor=_longrope_attention_factor(rope, factor, original),
            max_length=max_position,
            short_factor=_divisors(rope, "short_factor", rotary_dim // 2),
            long_factor=_divisors(rope, "long_factor", rotary_dim // 2),
        )
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

    if rope.raw("mscale") and rope.raw("mscale_all_dim"):
        mscale, all_dims = rope.number("mscale"), rope.number("mscale_all_dim")
        return yarn_scale(factor, mscale) / yarn_scale(factor, all_dims)
    return yarn_scale(factor, 1.0)


def yarn_scale(factor: float, mscale: float) -> float:
    """How much yarn scales queries and keys where the context is stretched by ``factor``."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope_attention_factor(rope: ConfigFields, factor: float, original: int) -> float:
    """The given factor, or one that follows from ``factor`` (Ding et al., 2024)."""
    if rope.has("attention_factor"):
        return rope.number("attention_factor")
    if factor <= 1:
        return 1.0
    if original < 2:
        rope.refuse("original_max_position_embeddings", "at least 2 with longrope")
    return math.sqrt(1 + math.log(factor) / math.log(original))


def _divisors(rope: ConfigFields, name: str, count: int) -> tuple[float, ...]:
    """A list of ``count`` positive numbers."""
    values = rope.numbers(name)
    if len(values) != count:
        rope.refuse(name, f"{count} numbers, one for each rotated pair")
    return values
