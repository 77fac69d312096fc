"""The products of a launch and how its CTAs share them."""

import dataclasses

WGMMA_M = 64
"""Columns of the weights that an instruction multiplies."""

_MAX_SPLITS = 8
_WIDE_FROM = 2048  # columns of the stream from which tiles of 128 are faster than those of 64
_SMEM_BYTES = 220 * 1024  # of 227 KB; Pallas and the barriers need some
_ROW_STAGES = 8
_UNDER_WAY_BYTES, _UNDER_WAY_AHEAD_BYTES = 96 * 1024, 32 * 1024


@dataclasses.dataclass(frozen=True, slots=True)
class Product:
    """Rows times one matrix or two of the same shape, in units of a column tile and a split.

    Attributes:
        depth: number of inputs, a multiple of ``step``.
        columns: columns of each matrix.
        matrices: number of matrices, 1 or 2.
        tile: columns of a unit, of each matrix.
        step: inputs that are multiplied at once.
        splits: number of splits of the depth.
    """

    depth: int
    columns: int
    matrices: int
    tile: int
    step: int
    splits: int

    @classmethod
    def of(
        cls, depth: int, columns: int, matrices: int, block: tuple[int, int], ctas: int
    ) -> "Product":
        """Split so that all CTAs have a unit; a pair of matrices is not split.

        block: (step, tile).
        """
        step, tile = block
        steps = depth // step
        most = 1 if matrices > 1 else min(_MAX_SPLITS, steps)
        splits = max(1, min(most, ctas * tile // columns))
        return cls(depth, columns, matrices, tile, step, -(-steps // -(-steps // splits)))

    @property
    def tiles(self) -> int:
        """Column tiles."""
        return self.columns // self.tile

    @property
    def units(self) -> int:
        """Units of all CTAs."""
        return self.tiles * self.splits

    @property
    def steps(self) -> int:
        """Steps of each split.

        Those of the last split may lie beyond the depth, where TMA reads zeros. All splits have
        equally many steps, so that ptxas knows the number: where it did not, all wgmma of the
        kernel took twice as long.
        """
        return -(-self.depth // self.step // self.splits)


@dataclasses.dataclass(frozen=True, slots=True)
class BlockSizes:
    """The products in order, and the shared memory of a CTA.

    Attributes:
        rows, D: T and the columns of the residual stream.
        output, gate_up, down: products of the layer.
        qkv: the next layer's product to queries, keys and values, or None.
        ctas: number of CTAs of the grid, which all run at the same time.
        weight_stages: pipeline stages of weights, ``step`` inputs by ``tile`` columns each, always
            16 KB.
        row_stages: pipeline stages of rows, ``step`` inputs of all rows each.
        under_way, under_way_ahead: stages of weights that are copied at the same time: while the
            consumer waits for them, and while they are copied ahead.
    """

    rows: int
    D: int
    output: Product
    gate_up: Product
    down: Product
    qkv: Product | None
    ctas: int
    weight_stages: int
    row_stages: int
    under_way: int
    under_way_ahead: int

    @classmethod
    def of(cls, rows: int, D: int, columns: tuple[int, ...], ctas: int) -> "BlockSizes":
        """The sizes of a launch; columns: see `PostAttentionProblem`."""
        E, F, *following = columns
        wide = D >= _WIDE_FROM and all(n % 128 == 0 for n in (D, F, *following))
        deep = not wide and all(n % 128 == 0 for n in (D, E, F))
        step, tile = block = 128 if deep else 64, 128 if wide else 64
        row_bytes, stage_bytes = rows * step * 2, step * tile * 2
        stages = (_SMEM_BYTES - _ROW_STAGES * row_bytes) // stage_bytes
        return cls(
            rows=rows,
            D=D,
            output=Product.of(E, D, 1, block, ctas),
            gate_up=Product.of(D, F, 2, block, ctas),
            down=Product.of(F, D, 1, block, ctas),
            qkv=Product.of(D, following[0], 1, block, ctas) if following else None,
            ctas=ctas,
            weight_stages=stages,
            row_stages=_ROW_STAGES,
            under_way=min(stages, _UNDER_WAY_BYTES // stage_bytes),
            under_way_ahead=min(stages, _UNDER_WAY_AHEAD_BYTES // stage_bytes),
        )

    @property
    def tile(self) -> int:
        """Columns of a block of weights."""
        return self.output.tile

    @property
    def step(self) -> int:
        """Inputs of a block."""
        return self.output.step
