"""How the work of a layer is divided over the CTAs, and where its words lie."""

import dataclasses

TILE = 64  # columns of a product's tile, and tokens of a page
_STEP = 128  # depth of a pipeline stage with one matrix
_MAX_HEAD_BLOCKS = 8  # (query heads of a unit) * (blocks of 64 dims), whose sums a thread holds
_MAX_KV_SPLITS = 16
_MAX_SPLITS = 8  # of a product's depth; each reader adds up the sums of all splits


@dataclasses.dataclass(frozen=True, slots=True)
class Product:
    """A product with one row, divided into units of one tile of columns and one split of the depth.

    Attributes:
        columns: of the result.
        steps: pipeline stages that cover the depth.
        splits: of the depth.
    """

    columns: int
    steps: int
    splits: int

    @property
    def tiles(self) -> int:
        """Of the columns."""
        return self.columns // TILE

    @property
    def units(self) -> int:
        """Unit u has tile u % tiles and split u // tiles."""
        return self.tiles * self.splits


@dataclasses.dataclass(frozen=True, slots=True)
class LayerSizes:
    """Sizes of a layer, and its division over ``ctas`` CTAs.

    Attributes:
        D, N, K, H, F: axes of the model.
        ctas: that run at the same time, one an SM.
    """

    D: int
    N: int
    K: int
    H: int
    F: int
    ctas: int

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
        """Of the normed row with the weights of queries, keys and values."""
        return self._product((self.N + 2 * self.K) * self.H, self.D // _STEP)

    @property
    def output(self) -> Product:
        """Of the merged attention; a split has whole query heads and whole steps."""
        most = max(1, self.ctas // (self.D // TILE))
        steps = self.N * self.H // _STEP
        whole = (s for s in range(min(most, self.N), 0, -1) if self.N % s == 0 and steps % s == 0)
        return Product(self.D, steps, next(whole))

    @property
    def gate_up(self) -> Product:
        """Of both matrices: a stage has 64 inputs of each."""
        return self._product(self.F, self.D // TILE)

    @property
    def down(self) -> Product:
        """Of the activated row."""
        return self._product(self.D, self.F // _STEP)

    def _product(self, columns: int, steps: int) -> Product:
        tiles = columns // TILE

        def slowest(splits: int) -> float:
            """Steps of the CTA with the most. A unit costs two more, a split a quarter."""
            return -(-tiles * splits // self.ctas) * (-(-steps // splits) + 2) + splits / 4

        return Product(columns, steps, min(range(1, min(steps, _MAX_SPLITS) + 1), key=slowest))

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
        """Of a partial result of one head: H sums, the largest score, the sum of weights."""
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
        return -(-self.down.steps // self.down.splits) * _STEP
