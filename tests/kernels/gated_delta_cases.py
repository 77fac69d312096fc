"""Steps of the gated delta rule with random rows, whose unused pages and slots hold NaN."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rjax.pallas_kernels.gated_delta import base
from rjax.pallas_kernels.gated_delta.states import CARRIED, NO_PAGE, LayerStates, StateRows

S, H, Y = 64, 128, 128

reference = jax.jit(base.gated_delta)


@dataclasses.dataclass
class Sequence:
    """A sequence of ``length`` tokens, of which ``done`` are in the states.

    With ``start`` it starts behind a page of another sequence, whose state exists. Pages get their
    states where ``wanted``.
    """

    slot: int
    length: int
    start: bool
    wanted: bool
    pages: list[int]
    done: int = 0


class Batch:
    """Sequences, their states in float32 arithmetic's order of magnitude, and all their tokens."""

    def __init__(self, lengths, *, K=1, G=2, dtype=jnp.bfloat16, seed=0, wanted=True):
        self.K, self.G, self.dtype = K, G, dtype
        self.random = np.random.default_rng(seed)
        slots = self.random.permutation(len(lengths) + 2)
        pages = iter(self.random.permutation(sum(n // S + 1 for n in lengths) + 2))
        self.sequences = [
            Sequence(
                int(slot), n, i % 2 == 1, wanted, [int(next(pages)) for _ in range(n // S + 1)]
            )
            for i, (slot, n) in enumerate(zip(slots, lengths, strict=False))
        ]
        self.tokens = [self._tokens(n) for n in lengths]
        self.layer = self._layer(len(slots), sum(n // S + 1 for n in lengths) + 2)

    def _normal(self, *shape) -> np.ndarray:
        return self.random.standard_normal(shape, np.float32)

    def _unit(self, *shape) -> np.ndarray:
        x = self._normal(*shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    def _tokens(self, n: int) -> list[np.ndarray]:
        K, G = self.K, self.G
        decay = -0.1 * np.abs(self._normal(n, K, G))
        beta = self.random.uniform(0, 1, (n, K, G)).astype(np.float32)
        return [self._unit(n, K, H), self._unit(n, K, H), self._normal(n, K, G, Y), decay, beta]

    def _layer(self, slots: int, pages: int) -> LayerStates:
        K, G = self.K, self.G
        states = np.full((pages, K, G, H, Y), np.nan, np.float32)
        for sequence in self.sequences:
            if sequence.start:
                states[sequence.pages[0]] = 0.3 * self._normal(K, G, H, Y)

        def empty(*shape, dtype=self.dtype):
            return jnp.full((slots, *shape), jnp.nan, dtype)

        return LayerStates(
            states=jnp.asarray(states),
            conv_ends=jnp.full((pages, 3, K, 4), jnp.nan, self.dtype),
            keys=empty(K, S, H),
            values=empty(K, G, S, Y),
            updates=empty(K, G, S, Y),
            gates=empty(K, G, 2, S, dtype=jnp.float32),
            recent=empty(3, K, 4),
        )

    def step(self, counts, *, padding=0, seqs=None) -> tuple[list[Any], StateRows]:
        """(operands before the layer, rows) of the next ``counts`` tokens of the sequences.

        The sequences come in another order than in the batch; padding rows, items and sequences
        follow them. Marks the tokens as done.
        """
        order = [int(i) for i in self.random.permutation(len(counts)) if counts[i]]
        items, rows, first, last = [], [], [], []
        for b, i in enumerate(order):
            sequence, left = self.sequences[i], counts[i]
            first.append(len(rows))
            page, offset = divmod(sequence.done, S)
            read = sequence.pages[page] if page or sequence.start else NO_PAGE
            while left:
                stop = min(S, offset + left)
                full = stop == S and sequence.wanted
                write = sequence.pages[page + 1] if full else NO_PAGE
                items.append((len(rows), b, offset, stop, read, write))
                rows += [(i, S * page + n, b) for n in range(offset, stop)]
                left -= stop - offset
                page, offset, read = page + 1, 0, CARRIED
            last.append(len(rows) - 1)
            sequence.done += counts[i]
        T = len(rows) + padding
        operands = []
        for n, dtype in enumerate([self.dtype] * 3 + [jnp.float32] * 2):
            found = [self.tokens[i][n][token] for i, token, _ in rows]
            found += [np.full_like(self.tokens[0][n][0], np.nan)] * padding
            operands.append(jnp.asarray(np.stack(found), dtype))
        seqs = len(order) + padding if seqs is None else seqs
        empty = (0, -1, 0, 0, NO_PAGE, NO_PAGE)
        # As many items as sequences are those of a step that decodes.
        more = padding + (max(counts) > 1 and len(items) + padding == seqs)
        table = np.array(items + [empty] * more, np.int32)

        def per_sequence(values, fill):
            return np.array(list(values) + [fill] * (seqs - len(order)), np.int32)

        step = StateRows(
            sequence=np.array([b for _, _, b in rows] + [-1] * padding, np.int32),
            first_row=per_sequence(first, -1),
            last_row=per_sequence(last, -1),
            slot=per_sequence([self.sequences[i].slot for i in order], 0),
            conv_page=per_sequence([NO_PAGE] * len(order), NO_PAGE),
            item_row=table[:, 0],
            item_sequence=table[:, 1],
            start=table[:, 2],
            stop=table[:, 3],
            read_page=table[:, 4],
            write_page=table[:, 5],
            num_items=np.array([len(items)], np.int32),
        )
        assert len(operands[0]) == T
        return operands, step

    def advance(self, counts) -> None:
        """Run a step of the reference."""
        operands, rows = self.step(counts)
        _, self.layer = reference(*operands, self.layer, rows)


def relative_error(got, want) -> float:
    """Norm of the difference over the norm of ``want``; NaN must be in the same places."""
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    assert got.shape == want.shape
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    difference, want = np.nan_to_num(got - want), np.nan_to_num(want)
    return float(np.linalg.norm(difference) / max(np.linalg.norm(want), 1e-30))


def tails(batch: Batch, layer: LayerStates) -> dict[str, list[np.ndarray]]:
    """Tails of the tokens since the last page's end, of each sequence."""
    found: dict[str, list[np.ndarray]] = {"keys": [], "values": [], "updates": [], "gates": []}
    for sequence in batch.sequences:
        count = sequence.done % S
        for name, arrays in found.items():
            tail = np.asarray(getattr(layer, name)[sequence.slot], np.float32)
            arrays.append(tail[..., :count] if name == "gates" else tail[..., :count, :])
    return found
