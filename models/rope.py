"""Rotary embedding tables for each kind of position scaling."""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

RopeKind = Literal["default", "linear", "llama3", "yarn", "dynamic", "longrope", "proportional"]


@dataclasses.dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of a model.

    Attributes:
        kind: method that maps long positions into the trained range.
        theta: base of the geometric series of wavelengths.
        rotary_dim: how many of the H dims rotate; even.
        factor: stretch of the context (all kinds but "default").
        rotated_pairs: rotary pairs with an angle; the others, which are the slowest, stay as they
            are (proportional).
        original_max_position: context before stretching (all kinds but "default" and "linear").
        low_freq_factor, high_freq_factor: ends of llama3's blend, in turns per original context.
        beta_fast, beta_slow: ends of yarn's blend, in turns per original context.
        truncate: yarn rounds the ends of its blend to whole dims.
        attention_factor: factor on the rotated queries and keys (yarn, longrope).
        interleaved: the rotated pairs are neighbours, x[2i] and x[2i + 1].
        max_length: tokens of the longest sequence (dynamic, longrope). The angles of these kinds
            depend on the length of a sequence; cached keys need one choice for all lengths.
        query_scale_beta: queries at position p are multiplied by 1 + beta * log(1 + floor(p /
            original_max_position)) (Llama 4).
        short_factor, long_factor: longrope's divisor of each frequency, up to the original context
            and beyond it.
    """

    kind: RopeKind
    theta: float
    rotary_dim: int
    factor: float = 1.0
    rotated_pairs: int = 0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    interleaved: bool = False
    max_length: int = 0
    query_scale_beta: float = 0.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @property
    def depends_on_length(self) -> bool:
        """Whether the angles depend on ``max_length``."""
        return self.kind in ("dynamic", "longrope")

    def stretched(self, declared: int) -> int:
        """Tokens of the longest sequence of a model with this ``max_position_embeddings``.

        yarn stretches the context that it was trained for, linear and dynamic the declared one.
        With llama3 and longrope the declared context is stretched already. vLLM has the same rules.
        """
        match self.kind:
            case "yarn":
                length = self.original_max_position * max(1.0, self.factor)
            case "linear" | "dynamic":
                length = declared * max(1.0, self.factor)
            case _:
                return declared
        return int(round(length, 3))  # a factor may be a rounded quotient of two lengths


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Rotary:
    """Float32 tables that rotate the first 2R dims of H, one row per token.

    The attention factor of yarn and longrope is folded into both tables.

    Attributes:
        cos, sin: cosines and sines of the angles.
        query_scale: factor on the queries of each token, or None.
    """

    cos: Float[Array, "T R"]
    sin: Float[Array, "T R"]
    query_scale: Float[Array, " T"] | None = None


def rotary_tables(config: RopeConfig, positions: Int[Array, " T"]) -> Rotary:
    """Float32 cosines and sines of every token's angles, R = rotary_dim / 2 of each."""
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(inverse_frequencies(config))
    scale = jnp.float32(config.attention_factor)
    query_scale = None
    if config.query_scale_beta:
        spans = (jnp.maximum(positions, 0) // config.original_max_position).astype(jnp.float32)
        query_scale = 1 + config.query_scale_beta * jnp.log(1 + spans)
    return Rotary(jnp.cos(angles) * scale, jnp.sin(angles) * scale, query_scale)


def halves_of_pairs(x: Float[Array, "*A H"], rotary_dim: int) -> Float[Array, "*A H"]:
    """Reorder the rotated dims from neighbouring pairs to halves: 0, 2, ..., 1, 3, ...

    Queries and keys in this order have the same products, and rotate as those of other models.
    """
    pairs = x[..., :rotary_dim].reshape(*x.shape[:-1], rotary_dim // 2, 2)
    halves = pairs.swapaxes(-1, -2).reshape(*x.shape[:-1], rotary_dim)
    return jnp.concatenate([halves, x[..., rotary_dim:]], -1)


def inverse_frequencies(config: RopeConfig) -> Float[np.ndarray, " R"]:
    """Radians per token of each rotated pair, float32.

    Every step is rounded to float32 as transformers does it: at position 100 000 an error of
    one unit in the last place of a frequency is an angle of 0.006.
    """
    exponents = np.arange(0, config.rotary_dim, 2).astype(np.float32) / np.float32(
        config.rotary_dim
    )
    # float64 power, rounded once: the nearest float32 to the true value.
    powers = (config.theta ** exponents.astype(np.float64)).astype(np.float32)
    plain = np.float32(1) / powers
    match config.kind:
        case "default":
            return plain
        case "linear":
            return plain / np.float32(config.factor)
        case "proportional":
            rotated = np.arange(len(plain)) < config.rotated_pairs
            return np.where(rotated, plain, np.float32(0)) / np.float32(config.factor)
        case "llama3":
            return _llama3(config, plain)
        case "yarn":
            return _yarn(config, powers)
        case "dynamic":
            return _dynamic(config, exponents)
        case "longrope":
            return _longrope(config, powers)


def _llama3(config: RopeConfig, plain: Float[np.ndarray, " R"]) -> Float[np.ndarray, " R"]:
    """Stretch long wavelengths, keep short ones, and blend those between (Llama 3.1)."""
    low, high = config.low_freq_factor, config.high_freq_factor
    old = config.original_max_position
    wavelength = np.float32(2 * math.pi) / plain
    stretched = plain / np.float32(config.factor)
    smooth = (np.float32(old) / wavelength - np.float32(low)) / np.float32(high - low)
    blend = (np.float32(1) - smooth) * stretched + smooth * plain
    result = np.where(wavelength > np.float32(old / low), stretched, plain)
    between = ~(wavelength < np.float32(old / high)) & ~(wavelength > np.float32(old / low))
    return np.where(between, blend, result).astype(np.float32)


def _dynamic(config: RopeConfig, exponents: Float[np.ndarray, " R"]) -> Float[np.ndarray, " R"]:
    """A larger base for sequences beyond the original context (NTK-aware scaling)."""
    dim, factor = config.rotary_dim, config.factor
    stretch = max(1.0, config.max_length / config.original_max_position)
    theta = config.theta * (factor * stretch - (factor - 1)) ** (dim / (dim - 2))
    powers = (theta ** exponents.astype(np.float64)).astype(np.float32)
    return np.float32(1) / powers


def _longrope(config: RopeConfig, powers: Float[np.ndarray, " R"]) -> Float[np.ndarray, " R"]:
    """Frequencies with searched divisors (LongRoPE; Ding et al., 2024)."""
    is_long = config.max_length > config.original_max_position
    factors = config.long_factor if is_long else config.short_factor
    return np.float32(1) / (np.asarray(factors, np.float32) * powers)


def _yarn(config: RopeConfig, powers: Float[np.ndarray, " R"]) -> Float[np.ndarray, " R"]:
    """Keep fast dims and stretch slow ones, with a linear ramp between (Peng et al., 2023)."""
    dim = config.rotary_dim

    def dim_of(turns: float) -> float:
        ratio = config.original_max_position / (turns * 2 * math.pi)
        return dim * math.log(ratio) / (2 * math.log(config.theta))

    low, high = dim_of(config.beta_fast), dim_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = (np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    kept = np.float32(1) - np.clip(ramp, 0, 1).astype(np.float32)
    stretched = np.float32(1) / (np.float32(config.factor) * powers)
    plain = np.float32(1) / powers
    return (stretched * (np.float32(1) - kept) + plain * kept).astype(np.float32)
