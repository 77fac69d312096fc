"""A decoder layer of one row in one launch on Hopper (Mosaic GPU).

One CTA an SM. A producer warpgroup copies all weights and KV that its CTA multiplies through one
ring of blocks in shared memory, as fast as the ring has room: no copy waits for another CTA. Two
consumer warpgroups compute queries, keys and values, then attention, the output projection, gate
and up, and down; between these stages the CTAs send each other partial sums as words in device
memory (`words`), which every CTA adds up for the part of the next row that it multiplies.
Bytes moved: the weights and the KV of the layer once from device memory; 4 bytes a word and reader
from L2, about 100 KB a CTA.

All CTAs must run at the same time, since they wait for each other's words: the grid has one CTA an
SM. A launch empties the words that the launch before it used.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

import dataclasses
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxlib.mlir.dialects import scf
from jaxtyping import Array, Float, Int, Int32

from rjax.pallas_kernels.mosaic_emit import add, address, evict_first, i32, mul, num_sms
from rjax.pallas_kernels.one_row_layer import attention as heads_of
from rjax.pallas_kernels.one_row_layer.gemv import BATCHES, multiplied, no_sums, send_sums
from rjax.pallas_kernels.one_row_layer.rows import activated_row, merged_row, normed_row
from rjax.pallas_kernels.one_row_layer.sizes import TILE, LayerSizes, Product
from rjax.pallas_kernels.one_row_layer.threads import BLOCK_TRANSFORMS, CONSUMERS, WARPS, simt
from rjax.pallas_kernels.partial import Partial
from rjax.pallas_kernels.words import EMPTY, store_words

_WARPGROUPS = CONSUMERS // 128
_SMEM_BYTES = 220 * 1024  # of 227 KB; Pallas and the barriers need some
_BLOCK_BYTES = 2 * TILE * TILE * 2  # of a stage
_MAX_STAGES = 14
_MIN_STAGES = 4
_PRODUCER_REGISTERS, _CONSUMER_REGISTERS = 40, 232  # a thread


@no_type_check  # JAX also builds it with other leaves than arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class LayerWeights:
    """The arrays of a layer, all bfloat16.

    Attributes:
        attention_norm, mlp_norm: of the RMS norms before both halves.
        qkv: for each KV head its queries, its key, its value.
        qkv_bias: its bias, or None.
        q_norm, k_norm: of RMS norms of queries and keys, or None.
        output, gate_up, down: of the other projections; gate before up.
    """

    attention_norm: Float[Array, " D"]
    mlp_norm: Float[Array, " D"]
    qkv: Float[Array, "D K A H"]
    qkv_bias: Float[Array, "K A H"] | None
    q_norm: Float[Array, " H"] | None
    k_norm: Float[Array, " H"] | None
    output: Float[Array, "E D"]
    gate_up: Float[Array, "D 2 F"]
    down: Float[Array, "F D"]


@no_type_check  # JAX also builds it with other leaves than arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class LayerWords:
    """The words of two launches, which take turns.

    Attributes:
        current: those of the next launch, all ``EMPTY``.
        other: those of the launch before, which the next one empties.
    """

    current: Int32[Array, " X"]
    other: Int32[Array, " X"]

    @classmethod
    def empty(cls, sizes: LayerSizes) -> "LayerWords":
        """Before the first launch of a step."""
        words = jnp.full((2, sizes.words), EMPTY, jnp.int32)
        return cls(words[0], words[1])


def refusal(
    *,
    rows: int,
    D: int,
    N: int,
    K: int,
    H: int,
    F: int,
    page_size: int,
    rotary_dim: int | None,
    dtype: DTypeLike,
    kv_dtype: DTypeLike,
) -> str | None:
    """Why the kernel cannot compute a layer of these sizes, or None."""
    if rows != 1:
        return f"{rows} rows; it takes one"
    if jnp.dtype(dtype) != jnp.bfloat16 or jnp.dtype(kv_dtype) != jnp.bfloat16:
        return f"activations in {dtype} and KV in {kv_dtype}; it takes bfloat16"
    if H not in (64, 128) or rotary_dim != H:
        return f"heads of {H} dims, {rotary_dim} rotated; it takes 64 or 128, all rotated"
    if page_size != TILE:
        return f"pages of {page_size} tokens; it takes {TILE}"
    if D % 128 or F % 128 or N * H % 128:
        return f"rows of {D}, {N * H} and {F} columns; it takes multiples of 128"
    sizes = LayerSizes(D, N, K, H, F, num_sms())
    if sizes.kv_splits < 1:
        return f"{K} KV heads in {sizes.passes} passes; it has {sizes.ctas} CTAs"
    if _stages(sizes) < _MIN_STAGES:
        return f"rows of {D} and {F} columns leave too little shared memory for weights"
    return None


def _stages(sizes: LayerSizes) -> int:
    rest = 4 * (sizes.D + (sizes.heads + 2) * sizes.H + 2 * 4 * TILE) + 2 * sizes.row_numbers
    rest += 4 * WARPS * sizes.heads * sizes.head_words + 4 * heads_of.table_numbers(sizes)
    return min(_MAX_STAGES, (_SMEM_BYTES - rest) // _BLOCK_BYTES)


def decoder_layer(
    x: Float[Array, "1 D"],
    update: Float[Array, "1 D"] | Partial,
    weights: LayerWeights,
    cos: Float[Array, "1 R"],
    sin: Float[Array, "1 R"],
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"],
    page_table: Int[Array, "B M"],
    positions: Int[Array, "1"],
    slots: Int[Array, "1"],
    words: LayerWords,
    *,
    scale: float,
    eps: float,
    head_eps: float = 0.0,
) -> tuple[
    Float[Array, "1 D"], Partial, Float[Array, "P K S H"], Float[Array, "P K S H"], LayerWords
]:
    """A layer of a decoder: attention and a gated feed-forward with silu, each behind a norm.

    Args:
        x, update: the residual stream and what the layer before adds to it.
        weights: of the layer.
        cos, sin: float32, of the row's position.
        k_pages, v_pages: bfloat16; the row's key and value are written in place.
        page_table: int32; row 0 lists the pages of the sequence.
        positions: int32, of the row: it attends to itself and all tokens before. Negative for
            padding, whose result nobody reads.
        slots: int32, where its key and value are stored, page * S + offset; negative for nowhere.
        words: of this launch and the one before.
        scale: of the scores.
        eps, head_eps: of the norms, and of those of queries and keys.

    Returns:
        (the residual stream after attention, the update of the feed-forward, the pages, the words
        for the next launch). Sums are float32; the row is rounded to bfloat16 where separate
        kernels store it.

    Raises:
        ValueError: sizes or dtypes that the kernel does not take (``refusal``).

    Source: "Look ma, no bubbles" (Hazy Research, 2025) for one kernel over stages that stream.
    """
    (_, D), (_, K, A, H), F = x.shape, weights.qkv.shape, weights.down.shape[0]
    N = K * (A - 2)
    why = refusal(
        rows=len(x),
        D=D,
        N=N,
        K=K,
        H=H,
        F=F,
        page_size=k_pages.shape[2],
        rotary_dim=2 * cos.shape[-1],
        dtype=x.dtype,
        kv_dtype=k_pages.dtype,
    )
    if why is not None:
        raise ValueError(why)
    sizes = LayerSizes(D, N, K, H, F, num_sms())
    stages = _stages(sizes)
    summands = update.summands if isinstance(update, Partial) else update[None]
    summands = summands.astype(jnp.float32).reshape(-1, 1, D)
    optional = {
        name: array
        for name in ("qkv_bias", "q_norm", "k_norm")
        if (array := getattr(weights, name)) is not None
    }
    mutable = (k_pages, v_pages, words.current, words.other)
    given = {
        "x": x,
        "summands": summands,
        "attention_norm": weights.attention_norm,
        "mlp_norm": weights.mlp_norm,
        "qkv": weights.qkv.reshape(D, -1),
        "output": weights.output,
        "gate_up": weights.gate_up,
        "down": weights.down,
        "cos": cos,
        "sin": sin,
        "page_table": page_table,
        "positions": positions,
        "slots": slots,
        **optional,
    }

    def one_row_layer(*refs, ring, full, empty, **scratch):
        """GMEM: the arrays of ``given``; K and V pages [P, K, 64, H], both words [X]; residual
        [1, D], update [splits * D]. SMEM: ring [stages, 2, 64, 64], and ``scratch``."""
        inputs = dict(zip(given, refs, strict=False))
        k_ref, v_ref, current, other, residual, partial = refs[len(given) :]
        cta, wg = lax.axis_index("cta"), lax.axis_index("wg")
        layer = _Layer(
            sizes=sizes,
            inputs=inputs,
            pages=(k_ref, v_ref),
            current=current,
            outputs=(residual, partial),
            scratch=scratch,
            ring=_Ring(ring, full, empty, stages),
            cta=cta,
            position=jnp.maximum(inputs["positions"][0], 0),
            scale=scale,
            eps=eps,
            head_eps=head_eps,
        )

        @pl.when(wg == _WARPGROUPS)
        def _producer():
            plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
            layer.produce(other)

        @pl.when(wg < _WARPGROUPS)
        def _consumer():
            plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
            layer.consume()

    pools = [jax.new_ref(array) for array in mutable]
    floats = {
        "stream": (D,),
        "tables": (heads_of.table_numbers(sizes),),
        "heads": (sizes.heads + 2, H),
        "new_scores": (sizes.heads,),
        "by_warp": (WARPS, sizes.heads, sizes.head_words),
        "sums": (2, 2, 2, TILE),
        "totals": (2, WARPS),
    }
    residual, partial = plgpu.kernel(
        one_row_layer,
        out_type=(
            jax.ShapeDtypeStruct((1, D), x.dtype),
            jax.ShapeDtypeStruct((sizes.down.splits * D,), jnp.float32),
        ),
        scratch_types=dict(
            ring=plgpu.SMEM((stages, 2, TILE, TILE), jnp.bfloat16, transforms=BLOCK_TRANSFORMS),
            row=plgpu.SMEM((sizes.row_numbers,), jnp.bfloat16),
            full=plgpu.Barrier(num_barriers=stages, num_arrivals=2),
            empty=plgpu.Barrier(num_barriers=stages, num_arrivals=_WARPGROUPS),
            **{name: plgpu.SMEM(shape, jnp.float32) for name, shape in floats.items()},
        ),
        grid=(sizes.ctas,),
        grid_names=("cta",),
        num_threads=_WARPGROUPS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )(*given.values(), *pools)
    k_pages, v_pages, used, emptied = (jax.freeze(pool) for pool in pools)
    found = Partial(partial.reshape(-1, 1, D), dtype=x.dtype)
    return residual, found, k_pages, v_pages, LayerWords(emptied, used)


@dataclasses.dataclass(frozen=True, slots=True)
class _Ring:
    """Stages of two blocks in shared memory; both sides count the stages from the first one on."""

    blocks: Any
    full: Any
    empty: Any
    stages: int

    def fill(self, number, copies) -> None:
        """Start copies of (source, is read once) into the blocks of stage ``number``."""
        stage = lax.rem(number, jnp.int32(self.stages))
        pl.when(number >= self.stages)(lambda: plgpu.barrier_wait(self.empty.at[stage]))
        for i, (source, once) in enumerate(copies):
            plgpu.copy_gmem_to_smem(source, self.blocks.at[stage, i], self.full.at[stage])
            if once:
                evict_first()

    def wait(self, number):
        """The stage whose blocks have arrived."""
        stage = lax.rem(number, jnp.int32(self.stages))
        plgpu.barrier_wait(self.full.at[stage])
        return stage

    def release(self, stage) -> None:
        """Let the producer refill a stage."""
        plgpu.barrier_arrive(self.empty.at[stage])


@dataclasses.dataclass(frozen=True, slots=True)
class _Layer:
    """A CTA's part of the layer. ``position`` is that of the row, at least 0."""

    sizes: LayerSizes
    inputs: dict[str, Any]
    pages: tuple[Any, Any]
    current: Any
    outputs: tuple[Any, Any]
    scratch: dict[str, Any]
    ring: _Ring
    cta: Any
    position: Any
    scale: float
    eps: float
    head_eps: float

    # The units of a CTA, the same for producer and consumers

    def _for_units(self, product: Product, run, number):
        """The stages used after all units, of ``number`` before.

        ``run(i, tile, split, first step, steps, number)`` for the i-th unit.
        """

        def step(i, number):
            unit = self.cta + i * self.sizes.ctas
            tile, split = lax.rem(unit, product.tiles), lax.div(unit, product.tiles)
            start = lax.div(split * product.steps, product.splits)
            count = lax.div((split + 1) * product.steps, product.splits) - start
            run(i, tile, split, start, count, number)
            return number + count

        units = lax.div(product.units - self.cta + self.sizes.ctas - 1, self.sizes.ctas)
        return lax.fori_loop(0, units, step, number)

    @property
    def _chunks(self):
        """Chunks of 64 tokens, the row's own included."""
        return lax.div(self.position, TILE) + 1

    @property
    def _attention_unit(self):
        """(unit, split, chunks of the split); CTAs beyond the units have 0 chunks."""
        per_split = self.sizes.K * self.sizes.passes
        unit, split = lax.rem(self.cta, per_split), lax.div(self.cta, per_split)
        splits = self.sizes.kv_splits
        mine = lax.div(jnp.maximum(self._chunks - split + splits - 1, 0), splits)
        return unit, split, jnp.where(split < splits, mine, 0)

    # Producer

    def produce(self, other) -> None:
        """Copy all blocks of the CTA, in the order of the stages; empty the other words."""
        sizes, inputs = self.sizes, self.inputs
        number = self._produce(sizes.qkv, [inputs["qkv"]], jnp.int32(0))
        _empty(other, self.cta, sizes)
        number = self._produce_kv(number)
        number = self._produce(sizes.output, [inputs["output"]], number)
        gate_up = [inputs["gate_up"].at[:, which] for which in range(2)]
        number = self._produce(sizes.gate_up, gate_up, number)
        self._produce(sizes.down, [inputs["down"]], number)

    def _produce(self, product: Product, matrices, number):
        depth = TILE if len(matrices) == 2 else 2 * TILE

        def unit(i, tile, split, start, count, number):
            del i, split
            columns = pl.ds(pl.multiple_of(tile * TILE, TILE), TILE)

            def stage(i, _):
                first = pl.multiple_of((start + i) * depth, depth)
                rows = [pl.ds(first, TILE), pl.ds(first + depth - TILE, TILE)]
                both = matrices if len(matrices) == 2 else matrices * 2
                copies = [(m.at[r, columns], True) for m, r in zip(both, rows, strict=True)]
                self.ring.fill(number + i, copies)

            lax.fori_loop(0, count, stage, None)

        return self._for_units(product, unit, number)

    def _produce_kv(self, number):
        unit, split, chunks = self._attention_unit
        head, blocks = lax.div(unit, self.sizes.passes), self.sizes.head_blocks
        table = self.inputs["page_table"]

        def chunk(i, _):
            page = jnp.maximum(table[0, split + i * self.sizes.kv_splits], 0)
            of_page = [pages.at[page, head] for pages in self.pages]
            parts = [
                (one.at[:, pl.ds(block * TILE, TILE)], False)
                for one in of_page
                for block in range(blocks)
            ]
            for j in range(blocks):
                self.ring.fill(number + i * blocks + j, parts[2 * j : 2 * j + 2])

        lax.fori_loop(0, chunks, chunk, None)
        return number + chunks * blocks

    # Consumers

    def consume(self) -> None:
        """Compute the stages one after the other."""
        sizes, inputs, scratch = self.sizes, self.inputs, self.scratch
        residual, partial = self.outputs
        stream, row, totals = scratch["stream"], scratch["row"], scratch["totals"]
        normed_row(
            *(inputs["x"], inputs["summands"], None, inputs["attention_norm"]),
            *(stream, row, totals.at[0], self.cta),
            eps=self.eps,
        )
        self._load_tables()
        number = self._multiply(sizes.qkv, jnp.int32(0), None, sizes.qkv_words)
        number = self._attend(number)

        splits = jnp.minimum(self._chunks, sizes.kv_splits)
        heads = sizes.N // sizes.output.splits

        def merge(split, start, count):
            del start, count
            merged_row(self.current, row, split * heads, splits, sizes)

        number = self._multiply(sizes.output, number, merge, sizes.output_words)
        normed_row(
            *(stream, self.current, residual, inputs["mlp_norm"], stream, row, totals.at[1]),
            self.cta,
            eps=self.eps,
            words_at=(sizes.output_words, sizes.output.splits),
        )
        number = self._multiply(sizes.gate_up, number, None, sizes.gate_up_words)

        def activate(split, start, count):
            del split
            activated_row(self.current, row, start * 2 * TILE, count * 2 * TILE, sizes)

        self._multiply(sizes.down, number, activate, 0, partial)

    def _multiply(self, product: Product, number, fill, words_at: int, target=None):
        """Multiply and send; ``fill(split, first step, steps)`` computes the unit's row."""
        row, sums, pair = self.scratch["row"], self.scratch["sums"], product == self.sizes.gate_up
        target = self.current if target is None else target

        def unit(turn, tile, split, start, count, number):
            if fill is not None:
                fill(split, start, count)
            first = jnp.int32(0) if fill is not None else start * (TILE if pair else 2 * TILE)

            def batch(size: int, done):
                def step(i, found):
                    begin = done + i * size
                    stages = [self.ring.wait(number + begin + j) for j in range(size)]
                    firsts = []
                    for j in range(size):
                        at = first + (begin + j) * (TILE if pair else 2 * TILE)
                        firsts += [at, at if pair else at + TILE]
                    blocks = tuple(self.ring.blocks.at[stage] for stage in stages)
                    found = multiplied(found, blocks, row, tuple(firsts))
                    for stage in stages:
                        self.ring.release(stage)
                    return found

                return step

            found, done = no_sums(), jnp.int32(0)
            for size in BATCHES:
                turns = lax.div(count - done, size)
                found = lax.fori_loop(0, turns, batch(size, done), found)
                done = done + turns * size
            matrices = 2 if pair else 1
            places = tuple(
                words_at + (split * matrices + j) * product.columns + tile * TILE
                for j in range(matrices)
            )
            # Two by turns: slow threads may still read those of the unit before.
            send_sums(found, sums.at[lax.rem(turn, 2)], target, places)

        return self._for_units(product, unit, number)

    def _load_tables(self) -> None:
        """Load early what the attention needs beside words: it comes from device memory."""
        inputs = self.inputs
        optional = [inputs[name] for name in ("q_norm", "k_norm", "qkv_bias") if name in inputs]
        unit, *_ = self._attention_unit
        heads_of.load_tables(
            *(inputs["cos"], inputs["sin"], inputs["slots"], optional, self.scratch["tables"]),
            *(lax.div(unit, self.sizes.passes), self.sizes),
        )

    def _attend(self, number):
        sizes, scratch, inputs = self.sizes, self.scratch, self.inputs
        unit, split, chunks = self._attention_unit
        blocks = sizes.head_blocks
        heads, new_scores = scratch["heads"], scratch["new_scores"]
        last = lax.div(self.position, TILE)
        has_new = lax.rem(last, sizes.kv_splits) == split

        @pl.when(chunks > 0)
        def _():
            heads_of.rotated_heads(
                *(self.current, scratch["tables"], heads, new_scores, unit),
                has_new.astype(jnp.int32),
                sizes=sizes,
                scale=self.scale,
                eps=self.head_eps,
                normed="q_norm" in inputs,
                biased="qkv_bias" in inputs,
            )

            def chunk(i, state):
                begin = number + i * blocks
                used = [self.ring.wait(begin + j) for j in range(blocks)]
                keys, values = (self.ring.blocks.at[stage] for stage in (used[0], used[-1]))
                tokens = self.position - (split + i * sizes.kv_splits) * TILE
                state = heads_of.attended(state, keys, values, heads, tokens, sizes=sizes)
                for stage in used:
                    self.ring.release(stage)
                return state

            state = lax.fori_loop(0, chunks, chunk, heads_of.no_attention(sizes))
            heads_of.send_attention(
                *(state, heads, new_scores, scratch["by_warp"], self.current, unit, split),
                has_new.astype(jnp.int32),
                sizes=sizes,
            )

            @pl.when(has_new & (lax.rem(unit, sizes.passes) == 0))
            def _():
                kv_head = lax.div(unit, sizes.passes)
                heads_of.write_kv(scratch["tables"], heads, *self.pages, kv_head, sizes)

        return number + chunks * blocks


def _empty(words, cta, sizes: LayerSizes) -> None:
    """Empty words of the launch before, by the producer's threads of all CTAs."""

    def emit(words, cta):
        step = sizes.ctas * 128
        mine = add(mul(cta, 128), add(mgpu.utils.thread_idx(), -CONSUMERS))
        loop = scf.ForOp(mul(mine, 4), i32(sizes.words), i32(4 * step), [])
        with mgpu.utils.ir.InsertionPoint(loop.body):
            at = address(words, mul(loop.induction_variable, 4))
            store_words(at, [i32(EMPTY)] * 4, "")
            scf.yield_([])

    simt(emit, (words,), (cta,))
