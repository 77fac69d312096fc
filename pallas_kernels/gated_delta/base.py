"""The gated delta rule and its causal convolution: the problems, and both in plain JAX.

Source: Gated Delta Networks, Yang, Kautz and Hatamizadeh, 2024; in chunks by the WY form of
Parallelizing Linear Transformers with the Delta Rule, Yang et al., 2024. A state S [H, Y] becomes

    S' = exp(decay) S,    S = S' + k update^T,    update = beta (v - S'^T k)

with each token, whose output is H^-0.5 S^T q.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float, Float32, Int

from rjax.pallas_kernels.gated_delta.states import CARRIED, LayerStates, StateRows
from rjax.pallas_kernels.kernel import Kernel, Problem, takes_all


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaProblem(Problem):
    """A step's rows on their way through the states of one layer.

    Attributes:
        operation: the operands and the result of each:

            - gated_delta: (q, k, v, decay, beta, `LayerStates`, `StateRows`) to (output,
              `LayerStates`), where q and k are normalised and decay is a logarithm;
            - causal_conv: (x, weight, `LayerStates`, `StateRows`) to (output, `LayerStates`).

        key_heads, values_a_key: K and G, on one device.
        key_dim, value_dim: H and Y.
        page_size: S.
        seqs: B, sequences of the step. A step with as many rows as sequences decodes.
    """

    key_heads: int
    values_a_key: int
    key_dim: int
    value_dim: int
    page_size: int
    seqs: int


def gated_delta(
    q: Float[Array, "T K H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K G Y"],
    decay: Float32[Array, "T K G"],
    beta: Float32[Array, "T K G"],
    layer: LayerStates,
    rows: StateRows,
) -> tuple[Float[Array, "T K G Y"], LayerStates]:
    """Outputs of the rows in v's dtype, and the states with the rows added.

    Everything is computed in float32, a page at once: what a token gets does not depend on how many
    tokens of its page are computed in the same step. Padding rows get 0.
    """
    S, T = layer.keys.shape[2], len(q)
    live = jnp.asarray(rows.item_sequence) >= 0
    slot = jnp.asarray(rows.slot)[jnp.maximum(rows.item_sequence, 0)]
    offset = jnp.arange(S)
    start, stop = jnp.asarray(rows.start)[:, None], jnp.asarray(rows.stop)[:, None]
    row = jnp.asarray(rows.item_row)[:, None] + offset - start
    new = (offset >= start) & (offset < stop) & live[:, None]
    row = jnp.where(new, row, T)

    def page(of_rows: Array, of_slots: Array) -> Array:
        """[I, ..., S, ...] of all tokens of each item's page, 0 behind ``stop``; S is axis 1."""
        found = of_rows.at[row].get(mode="fill", fill_value=0)
        shape = (len(row), S, *(1,) * (found.ndim - 2))
        before = jnp.where((offset < start).reshape(shape), of_slots[slot], 0)
        return jnp.where(new.reshape(shape), found, before).astype(jnp.float32)

    keys = page(k, jnp.moveaxis(layer.keys, 2, 1))
    values = page(v, jnp.moveaxis(layer.values, 3, 1))
    gates = page(jnp.stack([decay, beta], -1), jnp.moveaxis(layer.gates, 4, 1))
    queries = page(q, jnp.zeros((1, S, *q.shape[1:]), q.dtype)) * q.shape[-1] ** -0.5
    out, updates, states = _chunks(queries, keys, values, gates, layer.states, rows)
    out = jnp.zeros_like(v).at[row].set(out.astype(v.dtype), mode="drop")
    target = jnp.where(new, slot[:, None], len(layer.keys))

    def stored(pool: Array, axis: int, of_items: Array) -> Array:
        moved = jnp.moveaxis(pool, axis, 1)
        moved = moved.at[target, offset].set(of_items.astype(pool.dtype), mode="drop")
        return jnp.moveaxis(moved, 1, axis)

    layer = dataclasses.replace(
        layer,
        states=states,
        keys=stored(layer.keys, 2, keys),
        values=stored(layer.values, 3, values),
        updates=stored(layer.updates, 3, updates),
        gates=stored(layer.gates, 4, gates),
    )
    return out, layer


def _chunks(
    q: Float32[Array, "I S K H"],
    k: Float32[Array, "I S K H"],
    v: Float32[Array, "I S K G Y"],
    gates: Float32[Array, "I S K G 2"],
    states: Float32[Array, "P K G H Y"],
    rows: StateRows,
) -> tuple[Float32[Array, "I S K G Y"], Float32[Array, "I S K G Y"], Float32[Array, "P K G H Y"]]:
    """(outputs, updates, states) of whole pages, one after the other."""
    S = q.shape[1]
    total = jnp.moveaxis(jnp.cumsum(gates[..., 0], 1), 1, -1)  # [I, K, G, S], log decay so far
    beta = jnp.moveaxis(gates[..., 1], 1, -1)
    causal = jnp.tril(jnp.ones((S, S), bool))
    between = jnp.where(causal, total[..., :, None] - total[..., None, :], -jnp.inf)
    between = jnp.exp(between)  # [I, K, G, S, S], decay from the second token to the first
    overlap = jnp.einsum("iskh,itkh->ikst", k, k)[:, :, None]
    system = jnp.where(jnp.tril(causal, -1), beta[..., None] * overlap * between, 0)
    right = jnp.concatenate(
        [
            beta[..., None] * jnp.moveaxis(v, 1, 3),
            (beta * jnp.exp(total))[..., None] * jnp.moveaxis(k, 1, 2)[:, :, None],
        ],
        axis=-1,
    )
    solved = solve_triangular(system, right, lower=True, unit_diagonal=True)
    own, read = jnp.split(solved, [v.shape[-1]], axis=-1)  # [I, K, G, S, Y], [I, K, G, S, H]
    scores = jnp.einsum("iskh,itkh->ikst", q, k)[:, :, None] * between
    decayed_q = jnp.exp(total)[..., None] * jnp.moveaxis(q, 1, 2)[:, :, None]
    left = jnp.exp(total[..., -1:] - total)
    decayed_k = left[..., None] * jnp.moveaxis(k, 1, 2)[:, :, None]
    whole = jnp.exp(total[..., -1])

    def item(carry: tuple[Array, Array], each: tuple[Array, ...]) -> tuple[Any, Any]:
        states, state = carry
        own, read, scores, decayed_q, decayed_k, whole, read_page, write_page = each
        stored = jnp.where(read_page >= 0, states[jnp.maximum(read_page, 0)], 0)
        state = jnp.where(read_page == CARRIED, state, stored)
        update = own - jnp.einsum("kgsh,kghy->kgsy", read, state)
        out = jnp.einsum("kgsh,kghy->kgsy", decayed_q, state)
        out = out + jnp.einsum("kgst,kgty->kgsy", scores, update)
        state = whole[..., None, None] * state + jnp.einsum("kgsh,kgsy->kghy", decayed_k, update)
        page = jnp.where(write_page >= 0, write_page, len(states))
        states = states.at[page].set(state, mode="drop")
        return (states, state), (out, update)

    pages = jnp.asarray(rows.read_page), jnp.asarray(rows.write_page)
    each = (own, read, scores, decayed_q, decayed_k, whole, *pages)
    carry = states, jnp.zeros_like(states[0])
    (states, _), found = lax.scan(item, carry, each)
    out, update = (jnp.moveaxis(x, 3, 1) for x in found)
    return out, update, states


def causal_conv(
    x: Float[Array, "T K W"],
    weight: Float[Array, "K W X"],
    layer: LayerStates,
    rows: StateRows,
) -> tuple[Float[Array, "T K W"], LayerStates]:
    """silu of a convolution along each sequence, in x's dtype; the states with their inputs.

    Channel by channel, over the X - 1 tokens before a token and the token itself, whose weight is
    the last; in float32. Padding rows get numbers without meaning.
    """
    T, count = len(x), weight.shape[-1] - 1
    sequence = jnp.maximum(rows.sequence, 0)
    first_row = jnp.asarray(rows.first_row)
    conv_page = jnp.asarray(rows.conv_page)[:, None, None, None]
    ends = layer.conv_ends[jnp.maximum(rows.conv_page, 0)]
    before = jnp.where(conv_page >= 0, ends, 0)
    before = jnp.where(conv_page == CARRIED, layer.recent[jnp.asarray(rows.slot)], before)

    def inputs(row: Int[Array, " R"], ago: int) -> Float[Array, "R K W"]:
        """The input ``ago`` tokens before these rows."""
        of = sequence[row]
        behind = row - ago - first_row[of]  # rows of its sequence before it; negative before those
        old = before[of, jnp.clip(count + behind, 0, count - 1)]
        return jnp.where((behind >= 0)[:, None, None], x[jnp.maximum(row - ago, 0)], old)

    def last_inputs(row: Int[Array, " R"]) -> Float[Array, "R C K W"]:
        row = jnp.maximum(row, 0)
        return jnp.stack([inputs(row, ago) for ago in reversed(range(count))], 1)

    every = jnp.arange(T)
    w = weight.astype(jnp.float32)
    terms = [
        inputs(every, ago).astype(jnp.float32) * w[..., count - ago] for ago in range(count + 1)
    ]
    out = jax.nn.silu(sum(reversed(terms[:-1]), terms[-1])).astype(x.dtype)
    last_row = jnp.asarray(rows.last_row)
    slot = jnp.where(last_row >= 0, jnp.asarray(rows.slot), len(layer.recent))
    recent = layer.recent.at[slot].set(last_inputs(last_row), mode="drop")
    write_page = jnp.asarray(rows.write_page)
    page = jnp.where(write_page >= 0, write_page, len(layer.conv_ends))
    end = jnp.asarray(rows.item_row) + jnp.asarray(rows.stop) - jnp.asarray(rows.start) - 1
    conv_ends = layer.conv_ends.at[page].set(last_inputs(end), mode="drop")
    return out, dataclasses.replace(layer, recent=recent, conv_ends=conv_ends)


def split_mixed(
    mixed: Float[Array, "T K W"], key_dim: int, values_a_key: int
) -> tuple[Float[Array, "T K H"], Float[Array, "T K H"], Float[Array, "T K G Y"]]:
    """(queries, keys, values) of each key head, W = 2H + GY; queries and keys normalised.

    Each of these is divided by its length, in float32: x * rsqrt(sum x^2 + 1e-6).
    """
    q, k, v = jnp.split(mixed, [key_dim, 2 * key_dim], axis=-1)
    return _unit(q), _unit(k), v.reshape(*v.shape[:2], values_a_key, -1)


def _unit(x: Float[Array, "T K H"]) -> Float[Array, "T K H"]:
    x32 = x.astype(jnp.float32)
    return (x32 * lax.rsqrt(jnp.square(x32).sum(-1, keepdims=True) + 1e-6)).astype(x.dtype)


def _gated_delta(problem: GatedDeltaProblem, *operands: Any) -> Any:
    del problem
    return gated_delta(*operands)


def _causal_conv(problem: GatedDeltaProblem, *operands: Any) -> Any:
    del problem
    return causal_conv(*operands)


PLAIN_KERNELS = (
    Kernel("xla.gated_delta", "gated_delta", "xla", takes_all, _gated_delta),
    Kernel("xla.causal_conv", "causal_conv", "xla", takes_all, _causal_conv),
)
