"""Small arrays that a CTA needs late, loaded at its start.

They come from device memory, and once the ring is being filled such a load waits for all the
weights that are under way before it.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

import dataclasses
from collections.abc import Callable
from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir.dialects import arith, memref

from rjax.pallas_kernels.layer.one_row.sizes import LayerSizes
from rjax.pallas_kernels.layer.one_row.threads import (
    CONSUMERS,
    below,
    equal,
    f32,
    index,
    load,
    select,
    store,
    thread,
)
from rjax.pallas_kernels.mosaic.emit import add, i32, mul


@dataclasses.dataclass(frozen=True, slots=True)
class TablePlaces:
    """Where each array begins in the tables, float32 [size] SMEM.

    ``cos`` and ``sin`` are [H / 2], ``q_norm`` and ``k_norm`` [H], ``mlp_norm`` [D], ``biases``
    [A, H], those of the KV head of the CTA's unit; ``slot`` has the bits of one int32.
    """

    sin: int
    q_norm: int
    k_norm: int
    mlp_norm: int
    slot: int
    biases: int
    size: int
    cos: int = 0

    @classmethod
    def of(cls, sizes: LayerSizes) -> "TablePlaces":
        """The places for a layer's sizes."""
        H, D = sizes.H, sizes.D
        slot = 3 * H + D
        biases = slot + 4  # keeps runs of 4 numbers together
        return cls(H // 2, H, 2 * H, 3 * H, slot, biases, biases + (sizes.group + 2) * H)


@dataclasses.dataclass(frozen=True, slots=True)
class Overlap:
    """Work that is emitted into the code of another function.

    Attributes:
        refs, scalars: Refs and scalars that it needs.
        prefetch: called with both, before anything waits; starts loads.
        finish: called with both and the result of ``prefetch``.
    """

    refs: tuple[Any, ...] = ()
    scalars: tuple[Any, ...] = ()
    prefetch: Callable[..., Any] = lambda *_: None
    finish: Callable[..., None] = lambda *_: None


def tables(inputs: dict[str, Any], target, kv_head, sizes: LayerSizes) -> Overlap:
    """Work that copies the arrays to SMEM.

    Args:
        inputs: GMEM: float32 ``cos`` and ``sin`` [1, H / 2]; int32 ``slots`` [1]; ``mlp_norm`` [D];
            ``q_norm`` and ``k_norm`` [H], or neither; ``qkv_bias`` [K, A, H], or none.
        target: float32 [size] SMEM.
        kv_head: int32, the KV head of the CTA's unit.
        sizes: the layer's sizes.
    """
    places, H = TablePlaces.of(sizes), sizes.H
    parts = [
        ("cos", [0], H // 2, places.cos),
        ("sin", [0], H // 2, places.sin),
        ("mlp_norm", [], sizes.D, places.mlp_norm),
    ]
    if "q_norm" in inputs:
        parts += [("q_norm", [], H, places.q_norm), ("k_norm", [], H, places.k_norm)]
    if "qkv_bias" in inputs:
        parts += [
            ("qkv_bias", [None, entry], H, places.biases + entry * H)
            for entry in range(sizes.group + 2)
        ]
    names = list(dict.fromkeys(name for name, *_ in parts))

    def prefetch(target, slots, *given):
        del target
        *sources, kv_head = given
        by_name = dict(zip(names, sources, strict=True))
        loaded = []
        for name, prefix, size, to in parts:
            at = [kv_head if i is None else i32(i) for i in prefix]
            run = 1 if size <= CONSUMERS else 4
            for first in range(0, size, CONSUMERS * run):
                column = add(mul(thread(), run), first)
                inside = below(column, size)
                column = select(inside, column, i32(0))
                values = load(by_name[name], [*at, column], run)
                loaded.append((inside, add(column, to), values))
        return loaded, memref.load(slots, [index(0)])

    def finish(target, slots, *given):
        del slots
        loaded, slot = given[-1]
        for inside, to, values in loaded:
            with mgpu.when(inside):
                store(target, [to], values)
        with mgpu.when(equal(thread(), 0)):
            store(target, [places.slot], [arith.bitcast(f32(0).type, slot)])

    refs = (target, inputs["slots"], *(inputs[name] for name in names))
    return Overlap(refs, (kv_head,), prefetch, finish)
