"""Cases of the gated delta rule: one layer's decode steps and prompts."""

import dataclasses
from typing import Any

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

S = 64
"""Tokens of a page."""


@dataclasses.dataclass(frozen=True, slots=True)
class DeltaCase:
    """One step of one layer.

    Attributes:
        seqs: sequences of the step.
        tokens: tokens of each; with one token the step decodes.
        layers: layers with states of their own, together more than the L2 cache holds.
        rounds: how often a timed program calls each of them.
        key_heads, values_a_key: K and G.
        dim: H and Y.
    """

    seqs: int
    tokens: int
    layers: int
    rounds: int
    key_heads: int = 16
    values_a_key: int = 2
    dim: int = 128

    @property
    def decodes(self) -> bool:
        return self.tokens == 1

    @property
    def name(self) -> str:
        if self.decodes:
            return f"decode, {self.seqs} sequences"
        return f"prefill, {self.seqs} x {self.tokens} tokens"

    @property
    def rows(self) -> int:
        return self.seqs * self.tokens

    def offsets(self) -> np.ndarray:
        """Tokens of each sequence since its last page end; all kinds about equally often."""
        if not self.decodes:
            return np.zeros(self.seqs, np.int64)
        return np.random.default_rng(self.seqs).permutation(np.arange(self.seqs) * 29 % S)

    @property
    def moved(self) -> float:
        """Bytes that a step must move: each state and each tail once, its rows, and its outputs."""
        K, N, H = self.key_heads, self.key_heads * self.values_a_key, self.dim
        rows = self.rows * 2 * H * (2 * K + 2 * N)
        if not self.decodes:
            return rows + 4.0 * self.seqs * N * H * H  # the states at the end
        tail = self.offsets().sum() * 2 * H * (K + N)
        return rows + tail + 4.0 * self.seqs * N * H * H

    @property
    def flops(self) -> float:
        """FLOP of the products of whole pages; those of a decode step are left out."""
        if self.decodes:
            return 0.0
        K, N, H = self.key_heads, self.key_heads * self.values_a_key, self.dim
        per_token = K * 2 * 2 * S * H + N * (2 * 2 * S * H + 2 * S * H + 3 * 2 * H * H)
        return float(self.rows * per_token)

    def operands(self, key: jax.Array, rows: int | None = None) -> tuple[Any, ...]:
        """(q, k, v, decay, beta) with unit keys and queries."""
        T = self.rows if rows is None else rows
        K, G, H = self.key_heads, self.values_a_key, self.dim
        keys = jax.random.split(key, 5)
        q, k = (_unit(jax.random.normal(x, (T, K, H))) for x in keys[:2])
        v = jax.random.normal(keys[2], (T, K, G, H), jnp.bfloat16)
        decay = -0.1 * jnp.abs(jax.random.normal(keys[3], (T, K, G)))
        return q, k, v, decay, jax.random.uniform(keys[4], (T, K, G))

    def layer(self, key: jax.Array) -> LayerStates:
        """Random states; a sequence's are in the page, and its tail in the slot, of its number."""
        K, G, H, B = self.key_heads, self.values_a_key, self.dim, self.seqs
        keys = jax.random.split(key, 5)
        values = jax.random.normal(keys[1], (2, B, K, G, S, H), jnp.bfloat16)
        gates = jax.random.uniform(keys[2], (B, K, G, 2, S))
        return LayerStates(
            states=0.3 * jax.random.normal(keys[3], (2 * B, K, G, H, H)),
            conv_ends=jnp.zeros((1, 3, K, 1), jnp.bfloat16),
            keys=_unit(jax.random.normal(keys[0], (B, K, S, H))),
            values=values[0],
            updates=values[1],
            gates=gates * jnp.array([-0.1, 1.0])[:, None],
            recent=jnp.zeros((1, 3, K, 1), jnp.bfloat16),
        )

    def step(self) -> StateRows:
        """The rows; sequence i reads page i when it decodes, and page B + i gets its last state."""
        return self._step(np.full(self.seqs, self.tokens), self.offsets())

    def tail_step(self) -> StateRows:
        """The rows that fill the tails before a decode step."""
        return self._step(self.offsets(), np.zeros(self.seqs, np.int64))

    def _step(self, counts: np.ndarray, offsets: np.ndarray) -> StateRows:
        """``counts`` further tokens of sequences at these offsets of a page."""
        B, T = self.seqs, int(counts.sum())
        first_row = np.cumsum(counts) - counts
        items = []
        for i, (row, left, start) in enumerate(zip(first_row, counts, offsets, strict=True)):
            read = i if self.decodes else NO_PAGE
            while left > 0:
                stop = min(S, start + left)
                row, left, first = row + stop - start, left - (stop - start), start
                write = B + i if left == 0 and stop == S else NO_PAGE
                items.append((row - stop + first, i, first, stop, read, write))
                start, read = 0, CARRIED
        items += [(0, -1, 0, 0, NO_PAGE, NO_PAGE)] * (max_items(T, B, S) - len(items))
        table = np.array(items, np.int32)
        return StateRows(
            sequence=np.repeat(np.arange(B, dtype=np.int32), counts),
            first_row=first_row.astype(np.int32),
            last_row=(first_row + counts - 1).astype(np.int32),
            slot=np.arange(B, dtype=np.int32),
            conv_page=np.full(B, NO_PAGE, np.int32),
            item_row=table[:, 0],
            item_sequence=table[:, 1],
            start=table[:, 2],
            stop=table[:, 3],
            read_page=table[:, 4],
            write_page=table[:, 5],
            num_items=np.array([(table[:, 1] >= 0).sum()], np.int32),
        )


def _unit(x: jax.Array) -> jax.Array:
    return (x / jnp.linalg.norm(x, axis=-1, keepdims=True)).astype(jnp.bfloat16)


def delta_cases(*, small: bool) -> list[DeltaCase]:
    """A layer of Qwen3.6-35B-A3B on one GPU, or a small one for a CPU."""
    if small:
        shape = dict(key_heads=2, dim=32)
        return [DeltaCase(3, 1, 2, 2, **shape), DeltaCase(2, 100, 1, 1, **shape)]
    decodes = [(8, 1, 8, 6), (32, 1, 4, 4), (128, 1, 3, 2)]
    prompts = [(1, 2048, 4, 3), (1, 16384, 2, 1), (8, 2048, 2, 1)]
    return [DeltaCase(*case) for case in decodes + prompts]
