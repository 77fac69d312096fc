"""The block cache with another payload than KV: node embeddings of a graph.

A two-layer GraphSAGE (Hamilton et al., 2017) answers batches of seed nodes with a sampled
neighbourhood. The embeddings of the first layer are expensive, and batches overlap, so they are
cached in blocks of nodes. The cache is made of the engine's parts: `BlockManager` counts
references and evicts the least recently used block, `PageHashes` makes the keys, `HostPool` and
`PageMover` swap evicted blocks to host memory and back. A page holds the embeddings of one block
in place of the keys and values of one run of tokens.

    python -m rjax.examples.graph_embeddings
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from rjax.batch.page_hash import PageHashes, block_bytes, root_key
from rjax.batch.page_operations import PageOperations
from rjax.engine.pages.block_manager import BlockManager
from rjax.engine.pages.host_pool import HostPool
from rjax.errors import OutOfMemoryError
from rjax.models.sharding import single_device_mesh
from rjax.worker.pages.mover import PageMover

BLOCKS, BLOCK_NODES, NEIGHBOURS = 64, 64, 8
FEATURES, WIDTH, CLASSES = 32, 64, 8
SEEDS, BATCHES = 32, 200
DEVICE_PAGES, HOST_SLOTS = 24, 24


@dataclasses.dataclass(slots=True)
class Counts:
    """Block look-ups by where the block was found."""

    on_device: int = 0
    on_host: int = 0
    computed: int = 0


class EmbeddingCache:
    """Embeddings of blocks of nodes: some on the device, some on the host, the others computed.

    Args:
        version: version of the graph and the weights; other versions have other keys.
        compute: the embeddings [BLOCK_NODES, WIDTH] of a block.
        num_pages: blocks that fit on the device.
        num_slots: blocks that fit on the host.
    """

    def __init__(
        self,
        version: str,
        compute: Callable[[int], Float[Array, "S H"]],
        *,
        num_pages: int,
        num_slots: int,
    ) -> None:
        mesh = single_device_mesh()
        shape = (1, BLOCK_NODES, WIDTH)
        self.counts = Counts()
        self.blocks = BlockManager(num_pages, page_size=1)
        self._compute = compute
        self._root = root_key("graph embeddings", version)
        self._host = HostPool(num_slots)
        self._swapped: OrderedDict[int, None] = OrderedDict()  # host slots, oldest first
        self._key_of: dict[int, bytes] = {}
        self._operations = PageOperations()
        self._mover = PageMover(
            num_pages=num_pages,
            shape=shape,
            num_pools=1,
            num_slots=num_slots,
            dtype=jnp.dtype(jnp.float32),
            mesh=mesh,
        )
        sharding = NamedSharding(mesh, PartitionSpec(None, "tensor", None, None))
        self._pools = [jax.device_put(jnp.zeros((num_pages, *shape), jnp.float32), sharding)]

    @property
    def pages(self) -> Float[Array, "P 1 S H"]:
        """The device pool. The next `acquire` donates it: use it before."""
        return self._pools[0]

    def acquire(self, wanted: Iterable[int]) -> dict[int, int]:
        """The page of each block, with a reference that `release` gives back.

        Raises:
            OutOfMemoryError: batches in flight hold too many pages.
        """
        self.blocks.begin_step()
        keys = {block: self._key(block) for block in wanted}
        found: dict[int, int] = {}
        for block, key in keys.items():
            if pages := self.blocks.match([key]):
                self.blocks.acquire(pages)
                (found[block],) = pages
        missing = [block for block in keys if block not in found]
        slots = {block: self._host.find(keys[block]) for block in missing}
        saved = {block: slot for block, slot in slots.items() if slot is not None}
        for slot in saved.values():
            del self._swapped[slot]
        pages = self.blocks.allocate(len(missing))
        if pages is None:
            self.blocks.release(list(found.values()))
            self._swapped |= dict.fromkeys(saved.values())
            raise OutOfMemoryError(f"{len(missing)} blocks have no page; release a batch first")
        self._swap_out(pages)
        placed = dict(zip(missing, pages, strict=True))
        for block, slot in saved.items():
            self._operations.swap_in([slot], [placed[block]])
        self._pools = self._mover.run(self._pools, self._operations.take_kv())
        self._host.release(saved.values())
        fresh = [block for block in missing if block not in saved]
        if fresh:
            data = np.stack([np.asarray(self._compute(block)) for block in fresh])
            self._pools = self._mover.write(
                self._pools, [placed[block] for block in fresh], data[:, None, None]
            )
        for block, page in placed.items():
            self.blocks.register(page, keys[block], self._root, block_bytes([block]))
            self._key_of[page] = keys[block]
        self.counts.on_device += len(found)
        self.counts.on_host += len(saved)
        self.counts.computed += len(fresh)
        return found | placed

    def release(self, held: dict[int, int]) -> None:
        """Give back the references of an `acquire`; the blocks stay cached."""
        self.blocks.release(list(held.values()))

    def _key(self, block: int) -> bytes:
        """A block is a chain of one page, whose only token is the number of the block."""
        hashes = PageHashes(self._root, page_size=1)
        hashes.extend([block])
        return hashes.keys[0]

    def _swap_out(self, pages: list[int]) -> None:
        """Save the blocks that these pages held; the oldest saved blocks make room."""
        for page in pages:
            key = self._key_of.pop(page, None)
            if key is None:
                continue
            if not self._host.num_free and self._swapped:
                oldest, _ = self._swapped.popitem(last=False)
                self._host.release([oldest])
            slot = self._host.allocate(key)
            if slot is not None:
                self._swapped[slot] = None
                self._operations.swap_out([page], [slot])


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """Nodes with features, most neighbours in the same block or the next one."""

    features: Float[np.ndarray, "N F"]
    neighbours: Int[np.ndarray, "N D"]

    @classmethod
    def random(cls, rng: np.random.Generator) -> "Graph":
        """A graph of ``BLOCKS`` blocks."""
        nodes = BLOCKS * BLOCK_NODES
        near = rng.integers(-BLOCK_NODES // 2, BLOCK_NODES, (nodes, NEIGHBOURS))
        features = rng.normal(size=(nodes, FEATURES)).astype(np.float32)
        return cls(features, (np.arange(nodes)[:, None] + near) % nodes)


@jax.jit
def layer(
    own: Float[Array, "X I"], near: Float[Array, "X D I"], weight: Float[Array, "J O"]
) -> Float[Array, "X O"]:
    """GraphSAGE with mean aggregation: the node beside the mean of its neighbours; J = 2 I."""
    return jnp.concatenate([own, near.mean(axis=1)], axis=-1) @ weight


@jax.jit
def classify(
    pages: Float[Array, "P 1 S H"],
    seeds: Int[Array, " X"],
    near: Int[Array, "X D"],
    weight: Float[Array, "J O"],
) -> Float[Array, "X O"]:
    """The second layer, over embeddings at pool positions page * BLOCK_NODES + node."""
    pool = pages.reshape(-1, pages.shape[-1])
    return layer(pool[seeds], pool[near], weight)


def main() -> None:
    """Classify batches of seeds, and compare with embeddings that are all computed."""
    rng = np.random.default_rng(0)
    graph = Graph.random(rng)
    first = jnp.asarray(rng.normal(size=(2 * FEATURES, WIDTH)) / 8, jnp.float32)
    second = jnp.asarray(rng.normal(size=(2 * WIDTH, CLASSES)) / 8, jnp.float32)

    def embed(block: int) -> Float[Array, "S H"]:
        nodes = np.arange(block * BLOCK_NODES, (block + 1) * BLOCK_NODES)
        near = graph.features[graph.neighbours[nodes]]
        return jax.nn.relu(layer(graph.features[nodes], near, first))

    cache = EmbeddingCache("1", embed, num_pages=DEVICE_PAGES, num_slots=HOST_SLOTS)
    whole = jnp.concatenate([embed(block) for block in range(BLOCKS)])
    popular = rng.permutation(BLOCKS)
    held: list[dict[int, int]] = []  # of the batches in flight
    worst, most_shared = 0.0, 0
    for _ in range(BATCHES):
        # Seeds come from two blocks; few blocks are popular. Half of the neighbours are sampled.
        ranks = np.minimum(rng.zipf(1.3, 2) - 1, BLOCKS - 1)
        seeds = rng.choice(popular[ranks], SEEDS) * BLOCK_NODES
        seeds += rng.integers(0, BLOCK_NODES, SEEDS)
        near = rng.permuted(graph.neighbours[seeds], axis=1)[:, : NEIGHBOURS // 2]
        nodes = np.concatenate([seeds, near.ravel()])
        held.append(cache.acquire(np.unique(nodes // BLOCK_NODES).tolist()))
        if len(held) > 2:
            cache.release(held.pop(0))
        page_of = np.zeros(BLOCKS, np.int32)
        page_of[list(held[-1])] = list(held[-1].values())
        place = page_of[nodes // BLOCK_NODES] * BLOCK_NODES + nodes % BLOCK_NODES
        out = classify(cache.pages, place[:SEEDS], place[SEEDS:].reshape(near.shape), second)
        exact = layer(whole[seeds], whole[near], second)
        worst = max(worst, float(jnp.max(jnp.abs(out - exact))))
        shared = sum(cache.blocks.references(page) > 1 for page in held[-1].values())
        most_shared = max(most_shared, shared)
    for batch in held:
        cache.release(batch)
    found, pages = cache.counts, cache.blocks.counts()
    total = found.on_device + found.on_host + found.computed
    print(
        f"{total} block look-ups: {found.on_device} on the device, {found.on_host} swapped in "
        f"from the host, {found.computed} computed"
    )
    print(f"up to {most_shared} pages were held by two batches at once")
    print(f"pages: {pages.used} used, {pages.cached} cached, {pages.free} free")
    print(f"largest difference from computing everything: {worst:.1e}")


if __name__ == "__main__":
    main()
