"""The free pages of a pool, as a stack in arrays of fixed shape."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class FreePages:
    """The ids of the free pages among P.

    Attributes:
        ids: the first ``count`` of them are free; the last of these is taken first.
        count: number of free pages.
    """

    ids: Int[Array, " P"]
    count: Int[Array, ""]

    @classmethod
    def all_of(cls, num_pages: int) -> "FreePages":
        """All pages of a pool."""
        ids = jnp.arange(num_pages - 1, -1, -1, dtype=jnp.int32)
        return cls(ids, jnp.asarray(num_pages, jnp.int32))

    def take(self, wanted: Bool[Array, "..."]) -> tuple["FreePages", Int[Array, "..."]]:
        """Take a page for each true element; the first elements get the pages that are left.

        Returns:
            The rest, and the page of each element: -1 where none was wanted or none is left.
        """
        rank = jnp.cumsum(wanted.ravel(), dtype=jnp.int32).reshape(wanted.shape)
        given = wanted & (rank <= self.count)
        page = jnp.where(given, self.ids[jnp.maximum(self.count - rank, 0)], -1)
        left = self.count - jnp.sum(given, dtype=jnp.int32)
        return dataclasses.replace(self, count=left), page

    def put_back(self, pages: Int[Array, "..."], freed: Bool[Array, "..."]) -> "FreePages":
        """Free the pages of the true elements, which are different pages."""
        rank = jnp.cumsum(freed.ravel(), dtype=jnp.int32)
        place = jnp.where(freed.ravel(), self.count + rank - 1, self.ids.shape[0])
        ids = self.ids.at[place].set(pages.ravel().astype(jnp.int32), mode="drop")
        return dataclasses.replace(self, ids=ids, count=self.count + rank[-1])
