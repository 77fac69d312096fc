"""How the work of a layer is divided over the CTAs, and where its words lie."""

import dataclasses

TILE = 64
"""Columns of a block of weights, and tokens of a page."""

LINE_BITS = 1024
"""Bits of a line: the inputs that a block of few-bit weights has of each column."""

_MAX_HEAD_BLOCKS = 8  # (query heads of a unit) * (blocks of 64 dims), whose sums a thread holds
_MAX_KV_SPLITS = 16
_MAX_SPLITS = 8  # of a product's depth; each reader adds up the sums of all splits
# What a unit costs beside its steps, in steps: fitted to bfloat16; less for few-bit weights, whose
# CTAs have fewer steps, so that an even division matters more.
_UNIT_STEPS, _FEW_BIT_UNIT_STEPS = 2.0, 0.5


@dataclasses.dataclass(frozen=True, slots=True)
class Product:
    """A product with one row, divided into units of one tile of columns and one split of the depth.

    A pipeline stage has two blocks of weights. A block of 16-bit weights has 64 inputs of 64
    columns: the two blocks of one matrix are neighbours in depth, those of two matrices have the
    same inputs. A block of few-bit weights has 128 bytes of inputs of 64 columns, and both blocks
    have the same inputs.

    Attributes:
        matrices: number of matrices, one or two.
        columns: columns of each matrix.
        depth: number of inputs.
        splits: number of splits of the depth.
        bits: bits of a weight.
    """

    matrices: int
    columns: int
    depth: int
    splits: int
    bits: int

    @property
    def is_deep(self) -> bool:
        """Whether the blocks of a stage are neighbours in depth."""
        return self.matrices == 1 and self.bits == 16

    @property
    def step(self) -> int:
        """Inputs of a stage."""
        if self.bits < 16:
            return LINE_BITS // self.bits
        return 2 * TILE if self.is_deep else TILE

    @property
    def steps(self) -> int:
        """Pipeline stages that cover the depth."""
        return self.depth // self.step

    @property
    def tile(self) -> int:
        """Columns of a unit, of each matrix."""
        return TILE if self.matrices == 2 or self.is_deep else 2 * TILE

    @property
    def tiles(self) -> int:
        """Number of tiles of the columns."""
        return self.columns // self.tile

    @property
    def units(self) -> int:
        """Number of units; unit u has tile u % tiles and split u // tiles."""
        return self.tiles * self.splits

    def first_columns(self, tile) -> list:
        """First column of the results of each block of a tile; matrices lie behind each other."""
        if self.is_deep:
            return [tile * TILE]
        return [tile * self.tile + block * self._block_distance for block in range(2)]

    @property
    def _block_distance(self) -> int:
        return self.columns if self.matrices == 2 else TILE


@dataclasses.dataclass(frozen=True, slots=True)
class LayerSizes:
    """Sizes of a layer, and its division over ``ctas`` CTAs.

    Attributes:
        D, N, K, H, F: axes of the model.
        ctas: number of CTAs that run at the same time, one an SM.
        bits: bits of a weight.
    """

    D: int
    N: int
    K: int
    H: int
    F: int
    ctas: int
    bits: int = 16

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.N // self.K

    @property
    def head_blocks(self) -> int:
        """Blocks of 64 dims of a head."""
        return self.H // TILE

    @property
    def heads(self) -> int:
        """Query heads of a unit of the attention, which divide those of a KV head."""
        most = _MAX_HEAD_BLOCKS // self.head_blocks
        return next(n for n in range(min(most, self.group), 0, -1) if self.group % n == 0)

    @property
    def passes(self) -> int:
        """Units that attend over the same keys."""
        return self.group // self.heads

    @property
    def kv_splits(self) -> int:
        """Most splits of a sequence; chunk c of 64 tokens is of split c % kv_splits."""
        return min(_MAX_KV_SPLITS, self.ctas // (self.K * self.passes))

    @property
    def qkv(self) -> Product:
        """The product of the normed row with the weights of queries, keys and values."""
        return self._product(1, (self.N + 2 * self.K) * self.H, self.D)

    @property
    def output(self) -> Product:
        """The product of the merged attention; a split has whole query heads and whole steps."""
        whole = Product(1, self.D, self.N * self.H, 1, self.bits)
        most = max(1, min(self.ctas // whole.tiles, self.N, _MAX_SPLITS))
        splits = (s for s in range(most, 0, -1) if self.N % s == 0 and whole.steps % s == 0)
        return dataclasses.replace(whole, splits=next(splits))

    @property
    def gate_up(self) -> Product:
        """The product of the normed row with the gate and up matrices."""
        return self._product(2, self.F, self.D)

    @property
    def down(self) -> Product:
        """The product of the activated row with the down matrix."""
        return self._product(1, self.D, self.F)

    def _product(self, matrices: int, columns: int, depth: int) -> Product:
        whole = Product(matrices, columns, depth, 1, self.bits)
        steps, of_unit = whole.steps, _UNIT_STEPS if self.bits == 16 else _FEW_BIT_UNIT_STEPS

        def slowest(splits: int) -> float:
            """Steps of the CTA with the most, plus the cost of its units and of all splits."""
            units = -(-whole.tiles * splits // self.ctas)
            return units * (-(-steps // splits) + of_unit) + splits / 4

        best = min(range(1, min(steps, _MAX_SPLITS) + 1), key=slowest)
        return dataclasses.replace(whole, splits=best)

    @property
    def qkv_words(self) -> int:
        """First word of the partial sums of queries, keys and values: [splits, columns]."""
        return 0

    @property
    def attention_words(self) -> int:
        """First word of the partial attention, [N / heads, kv_splits, heads, head_words]."""
        return self.qkv_words + self.qkv.splits * self.qkv.columns

    @property
    def head_words(self) -> int:
        """Words of a partial result of one head: H sums, the largest score, the sum of weights."""
        return self.H + 4  # keeps runs of 4 words together

    @property
    def output_words(self) -> int:
        """First word of the partial sums of the output projection: [splits, D]."""
        return self.attention_words + self.N * self.kv_splits * self.head_words

    @property
    def gate_up_words(self) -> int:
        """First word of the partial sums of gate and up: [splits, 2, F]."""
        return self.output_words + self.output.splits * self.D

    @property
    def words(self) -> int:
        """All words of a layer."""
        return self.gate_up_words + self.gate_up.splits * 2 * self.F

    @property
    def row_numbers(self) -> int:
        """Numbers of the longest row that a CTA holds."""
        return max(self.D, self.N * self.H // self.output.splits, self.activated_numbers)

    @property
    def activated_numbers(self) -> int:
        """Most columns of F that a unit of the product down takes."""
        return -(-self.down.steps // self.down.splits) * self.down.step
