"""The root keys of page hash chains: identity and version of the weights, and the salt."""

import dataclasses

from rjax.batch.page_hash import salted_key, versioned_key


@dataclasses.dataclass(slots=True)
class PageRoots:
    """The first key of each chain, so that KV matches only where the same weights computed it.

    Attributes:
        identity: configuration, dtypes and the weights that the engine started with.
        weights_version: number of updates since then.
    """

    identity: bytes
    weights_version: int = 0

    def of(self, salt: str | None) -> bytes:
        """The root of the chains of a cache salt, or of those without one."""
        root = versioned_key(self.identity, self.weights_version)
        return root if salt is None else salted_key(root, salt)
