"""A function of arrays that is lowered at once and compiled later."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax


class Program:
    """``function`` for arguments of given shapes.

    The constructor traces and lowers, which holds the GIL. ``compile`` mostly does not, so many
    programs can be compiled in parallel by threads. A call compiles if needed.

    Args:
        function: of trees of arrays.
        args: what it will be called with, or ``jax.ShapeDtypeStruct`` instead of arrays.
        compiler_options: of XLA.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *args: Any,
        compiler_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.tree: Any  # of what it returns, the jax.tree_util.PyTreeDef
        # Flat, because a plan refuses the placeholders that lowering puts into trees.
        leaves, tree = jax.tree.flatten(args)

        def flat(*leaves):
            found, self.tree = jax.tree.flatten(function(*tree.unflatten(leaves)))
            return found

        self._lowered = jax.jit(flat).lower(*leaves)
        self._options = dict(compiler_options or {})

    @property
    def leaves(self) -> list[jax.ShapeDtypeStruct]:
        """The arrays that it returns, as shapes."""
        return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self._lowered.out_info]

    @functools.cached_property
    def _compiled(self) -> jax.stages.Compiled:
        return self._lowered.compile(self._options)

    def compile(self) -> None:
        """Once; errors are XLA's."""
        _ = self._compiled

    def bound(self, *args: Any) -> Callable[[], list[jax.Array]]:
        """The call with these arguments, with little dispatch overhead; returns flat outputs."""
        return functools.partial(self._compiled, *jax.tree.leaves(args))

    def __call__(self, *args: Any) -> Any:
        return self.tree.unflatten(self.bound(*args)())
