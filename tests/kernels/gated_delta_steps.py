"""Sequences that go through the gated delta rule in steps, and the rule token by token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from rjax.pallas_kernels.gated_delta.states import (
    CARRIED,
    NO_PAGE,
    LayerStates,
    StateRows,
    max_items,
)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a layer."""

    K: int = 2
    G: int = 2
    H: int = 8
    Y: int = 8
    S: int = 8
    taps: int = 4

    @property
    def mixed_dim(self) -> int:
        return 2 * self.H + self.G * self.Y


def empty_states(sizes: Sizes, pages: int, slots: int, dtype=jnp.float32) -> LayerStates:
    """Arrays full of NaN: nothing may be read before it is written."""

    def nan(*shape, dtype=dtype):
        return jnp.full(shape, jnp.nan, dtype)

    K, G, H, Y, S, W = sizes.K, sizes.G, sizes.H, sizes.Y, sizes.S, sizes.mixed_dim
    return LayerStates(
        states=nan(pages, K, G, H, Y, dtype=jnp.float32),
        conv_ends=nan(pages, sizes.taps - 1, K, W),
        keys=nan(slots, K, S, H),
        values=nan(slots, K, G, S, Y),
        updates=nan(slots, K, G, S, Y),
        gates=nan(slots, K, G, 2, S, dtype=jnp.float32),
        recent=nan(slots, sizes.taps - 1, K, W),
    )


@dataclasses.dataclass
class Part:
    """Tokens [start, stop) of a sequence in a step.

    Attributes:
        slot: its slot.
        start, stop: its tokens.
        pages: the page that gets the state after each full page; NO_PAGE for none.
        resumes: its slot has nothing yet: it follows the page before.
    """

    slot: int
    start: int
    stop: int
    pages: list[int]
    resumes: bool = False


def state_rows(parts: list[Part], page_size: int, *, rows: int, seqs: int) -> StateRows:
    """The rows of a step, padded."""
    S, items = page_size, max_items(rows, seqs, page_size)
    of_seqs = np.full((4, seqs), -1, np.int32)
    sequence = np.full(rows, -1, np.int32)
    found, row = [], 0
    for b, part in enumerate(parts):
        count = part.stop - part.start
        sequence[row : row + count] = b
        first = part.start // S
        before = NO_PAGE if part.start < S else part.pages[first - 1]
        fresh = part.start % S == 0
        of_seqs[:, b] = row, row + count - 1, part.slot, before if fresh else CARRIED
        for page in range(first, -(-part.stop // S)):
            start, stop = max(part.start, page * S), min(part.stop, (page + 1) * S)
            full = stop == (page + 1) * S
            found.append(
                (
                    row + start - part.start,
                    b,
                    start % S,
                    stop - page * S,
                    before if page == first else CARRIED,
                    part.pages[page] if full else NO_PAGE,
                )
            )
        row += count
    padded = np.full((6, items), -1, np.int32)
    padded[:, : len(found)] = np.array(found, np.int32).T
    padded[[0, 2, 3], len(found) :] = 0
    num = np.array([len(found)], np.int32)
    return StateRows(sequence, *of_seqs, *padded, num)


def recurrence(q, k, v, decay, beta, state=None):
    """(outputs, state) token by token, in float64."""
    q, k, v, decay, beta = (np.asarray(x, np.float64) for x in (q, k, v, decay, beta))
    T, K, H = q.shape
    G, Y = v.shape[2:]
    state = np.zeros((K, G, H, Y)) if state is None else np.asarray(state, np.float64)
    out = np.zeros((T, K, G, Y))
    for t in range(T):
        state = state * np.exp(decay[t])[..., None, None]
        read = np.einsum("kghy,kh->kgy", state, k[t])
        update = beta[t][..., None] * (v[t] - read)
        state = state + np.einsum("kh,kgy->kghy", k[t], update)
        out[t] = np.einsum("kghy,kh->kgy", state, q[t]) * H**-0.5
    return out, state


def random_tokens(sizes: Sizes, tokens: int, seed: int, dtype=jnp.float32):
    """(q, k, v, decay, beta) of a sequence, as a layer makes them."""
    rng = np.random.default_rng(seed)
    K, G, H, Y = sizes.K, sizes.G, sizes.H, sizes.Y

    def normed(x):
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    q, k = (normed(rng.normal(size=(tokens, K, H))) for _ in range(2))
    v = rng.normal(size=(tokens, K, G, Y))
    decay = -np.log1p(np.exp(rng.normal(size=(tokens, K, G)))) * rng.uniform(0.01, 2, (K, G))
    beta = 1 / (1 + np.exp(-rng.normal(size=(tokens, K, G))))
    return (
        *(jnp.asarray(x, dtype) for x in (q, k, v)),
        *(jnp.asarray(x, jnp.float32) for x in (decay, beta)),
    )


def convolution(x, weight):
    """silu of the causal convolution of one sequence from its first token on, in float64."""
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    taps = weight.shape[1]
    padded = np.concatenate([np.zeros((taps - 1, *x.shape[1:])), x])
    out = sum(padded[i : i + len(x)] * weight[:, i] for i in range(taps))
    return out / (1 + np.exp(-out))


def stacked(parts, arrays, rows: int):
    """The rows of a step out of the arrays of its sequences, padded with NaN."""

    def stack(*of_sequences):
        found = jnp.concatenate(of_sequences)
        padding = [(0, rows - len(found)), *[(0, 0)] * (found.ndim - 1)]
        return jnp.pad(found, padding, constant_values=jnp.nan)

    cut = [
        jax.tree.map(lambda x, p=part: x[p.start : p.stop], array)
        for part, array in zip(parts, arrays, strict=True)
    ]
    return jax.tree.map(stack, *cut)
