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
            - causal_conv: (x, weight, `LayerStates`, `StateRows`) to ((queries, keys, values),
              `LayerStates`), see `split_mixed`.

        key_heads, values_a_key: K and G, on one device.
        key_dim, value_dim: H and Y.
        page_size: S.
        seqs, items: B and I, sequences and items of the step.
    """

    key_heads: int
    values_a_key: int
    key_dim: int
    value_dim: int
    page_size: int
    seqs: int
    items: int

    @property
    def decodes(self) -> bool:
        """Whether each sequence has one row at most, for which there are as many items."""
        return self.items == self.seqs


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

    Everything is computed in float32, one whole page after the other: what a token gets does not
    depend on how many tokens of its page are computed in the same step. Padding rows get 0.
    """
    S, T = layer.keys.shape[2], len(q)
    offset = jnp.arange(S)
    rows = StateRows(*map(jnp.asarray, rows))
    slot_of_item = rows.slot[jnp.maximum(rows.item_sequence, 0)]

    def item(carry: tuple[Any, ...], each: tuple[Array, ...]) -> tuple[Any, None]:
        out, layer, state = carry
        row, sequence, slot, start, stop, read_page, write_page = each
        new = (offset >= start) & (offset < stop) & (sequence >= 0)
        row = jnp.where(new, row + offset - start, T)

        def page(of_rows: Array, pool: Array | None = None, axis: int = 0) -> Array:
            """The tokens of the page, [S, ...] in float32; 0 behind ``stop``."""
            found = of_rows.at[row].get(mode="fill", fill_value=0)
            if pool is not None:
                shape = (S, *(1,) * (found.ndim - 1))
                before = jnp.where(
                    (offset < start).reshape(shape), jnp.moveaxis(pool[slot], axis, 0), 0
                )
                found = jnp.where(new.reshape(shape), found, before)
            return found.astype(jnp.float32)

        keys, values = page(k, layer.keys, 1), page(v, layer.values, 2)
        gates = page(jnp.stack([decay, beta], -1), layer.gates, 3)
        stored = jnp.where(read_page >= 0, layer.states[jnp.maximum(read_page, 0)], 0)
        state = jnp.where(read_page == CARRIED, state, stored)
        found, updates, state = _page(page(q), keys, values, gates, state)
        out = out.at[row].set(found.astype(out.dtype), mode="drop")
        target = jnp.where(write_page >= 0, write_page, len(layer.states))
        place = jnp.where(new & (stop < S), offset, S)  # a full page has no tail

        def tail(pool: Array, axis: int, of_page: Array) -> Array:
            moved = jnp.moveaxis(pool, axis, 1)
            moved = moved.at[slot, place].set(of_page.astype(pool.dtype), mode="drop")
            return jnp.moveaxis(moved, 1, axis)

        layer = dataclasses.replace(
            layer,
            states=layer.states.at[target].set(state, mode="drop"),
            keys=tail(layer.keys, 2, keys),
            values=tail(layer.values, 3, values),
            updates=tail(layer.updates, 3, updates),
            gates=tail(layer.gates, 4, gates),
        )
        return (out, layer, state), None

    of_items = rows.start, rows.stop, rows.read_page, rows.write_page
    items = (rows.item_row, rows.item_sequence, slot_of_item, *of_items)
    carry = jnp.zeros_like(v), layer, jnp.zeros_like(layer.states[0])
    (out, layer, _), _ = lax.scan(item, carry, items)
    return out, layer


def _page(
    q: Float32[Array, "S K H"],
    k: Float32[Array, "S K H"],
    v: Float32[Array, "S K G Y"],
    gates: Float32[Array, "S K G 2"],
    state: Float32[Array, "K G H Y"],
) -> tuple[Float32[Array, "S K G Y"], Float32[Array, "S K G Y"], Float32[Array, "K G H Y"]]:
    """(outputs, updates, the state behind them) of the tokens of a page, from the one before."""
    S, _, H = q.shape
    total = jnp.moveaxis(jnp.cumsum(gates[..., 0], 0), 0, -1)  # [K, G, S], log decay so far
    beta = jnp.moveaxis(gates[..., 1], 0, -1)
    q, k, v = (jnp.moveaxis(x, 0, -2) for x in (q * H**-0.5, k, v))
    causal = jnp.tril(jnp.ones((S, S), bool))
    between = jnp.where(causal, total[..., :, None] - total[..., None, :], -jnp.inf)
    between = jnp.exp(between)  # [K, G, S, S], decay from the second token to the first
    overlap = jnp.einsum("ksh,kth->kst", k, k)[:, None]
    system = jnp.where(jnp.tril(causal, -1), beta[..., None] * overlap * between, 0)
    read = (beta * jnp.exp(total))[..., None] * k[:, None]
    right = jnp.concatenate([beta[..., None] * v, read], axis=-1)
    solved = _solved(system, right)
    own, read = jnp.split(solved, [v.shape[-1]], axis=-1)  # [K, G, S, Y], [K, G, S, H]
    update = own - jnp.einsum("kgsh,kghy->kgsy", read, state)
    scores = jnp.einsum("ksh,kth->kst", q, k)[:, None] * between
    out = jnp.einsum("kgsh,kghy->kgsy", jnp.exp(total)[..., None] * q[:, None], state)
    out = out + jnp.einsum("kgst,kgty->kgsy", scores, update)
    left = jnp.exp(total[..., -1:] - total)[..., None] * k[:, None]
    state = jnp.exp(total[..., -1])[..., None, None] * state
    state = state + jnp.einsum("kgsh,kgsy->kghy", left, update)
    return *(jnp.moveaxis(x, 2, 0) for x in (out, update)), state


def _solved(
    system: Float32[Array, "K G S S"], right: Float32[Array, "K G S Z"]
) -> Float32[Array, "K G S Z"]:
    """X with (1 + system) X = right, where system is strictly lower triangular, row by row.

    XLA's own solver calls LAPACK on a CPU, which a program that comes from disk has not loaded.
    """

    def row(s: Int[Array, ""], found: Float32[Array, "K G S Z"]) -> Float32[Array, "K G S Z"]:
        known = jnp.einsum("kgt,kgtz->kgz", system[:, :, s], found)
        return found.at[:, :, s].set(right[:, :, s] - known)

    return lax.fori_loop(0, right.shape[2], row, jnp.zeros_like(right))


def causal_conv(
    x: Float[Array, "T K W"],
    weight: Float[Array, "K X W"],
    layer: LayerStates,
    rows: StateRows,
) -> tuple[Float[Array, "T K W"], LayerStates]:
    """silu of a convolution along each sequence, in x's dtype; the states with their inputs.

    Channel by channel, over the X - 1 tokens before a token and the token itself, whose weight is
    the last; in float32. Padding rows get numbers without meaning.
    """
    T, count = len(x), weight.shape[1] - 1
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
    terms = [inputs(every, ago).astype(jnp.float32) * w[:, count - ago] for ago in range(count + 1)]
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
    x, layer = causal_conv(*operands)
    return split_mixed(x, problem.key_dim, problem.values_a_key), layer


PLAIN_KERNELS = (
    Kernel("xla.gated_delta", "gated_delta", "xla", takes_all, _gated_delta),
    Kernel("xla.causal_conv", "causal_conv", "xla", takes_all, _causal_conv),
)
