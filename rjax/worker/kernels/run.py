"""Running a kernel on every device of a mesh."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array

from rjax.pallas_kernels.kernel import Kernel, Problem

type RunKernel = Callable[
    [Kernel, Problem, tuple[Any, ...], tuple[Any, ...], Callable[[Any], Any]], Any
]
"""`run_kernel` on a mesh that is known."""


def run_kernel(
    kernel: Kernel,
    problem: Problem,
    operands: tuple[Any, ...],
    specs: tuple[Any, ...],
    of_result: Callable[[Any], Any],
    mesh: Mesh | AbstractMesh,
) -> Any:
    """Run a kernel, on a mesh under ``shard_map``.

    Args:
        kernel, problem: the choice.
        operands: the operation's operands.
        specs: partition specs of the operands, or a prefix of that tree.
        of_result: maps the result of one device, as shapes, to its specs.
        mesh: the devices.
    """
    if mesh.size == 1:
        return _run(operands, kernel=kernel, problem=problem)
    flat, tree = jax.tree.flatten(operands)
    whole_specs = jax.tree.broadcast(specs, operands, is_leaf=_is_spec)
    each = jax.tree.leaves(whole_specs, is_leaf=_is_spec)
    shapes = tuple(_local(leaf, spec, mesh) for leaf, spec in zip(flat, each, strict=True))
    found = _result(kernel, problem, tree, shapes, tuple(mesh.shape.items()))
    out_specs, out_tree = jax.tree.flatten(of_result(found), is_leaf=_is_spec)
    return _run_sharded(
        flat,
        tree=tree,
        kernel=kernel,
        problem=problem,
        mesh=mesh,
        in_specs=tuple(each),
        out_specs=tuple(out_specs),
        out_tree=out_tree,
    )


@functools.lru_cache(maxsize=256)  # every layer asks the same
def _result(
    kernel: Kernel,
    problem: Problem,
    tree: Any,
    shapes: tuple[jax.ShapeDtypeStruct, ...],
    axes: tuple[tuple[str, int], ...],
) -> Any:
    """The result of one device, as shapes.

    Like ``jax.eval_shape``, but under the axes of the mesh, which a sum over the devices names.
    """
    run = functools.partial(kernel.run, problem)
    local = jax.make_jaxpr(run, axis_env=list(axes), return_shape=True)
    return local(*jax.tree.unflatten(tree, shapes))[1]


def _is_spec(value: Any) -> bool:
    return isinstance(value, PartitionSpec)


def _local(leaf: Array, spec: PartitionSpec, mesh: Mesh | AbstractMesh) -> jax.ShapeDtypeStruct:
    """Shape and dtype of one device's part of a leaf."""
    cuts = [*spec, *[None] * (leaf.ndim - len(spec))]
    shape = (size // (mesh.size if cut else 1) for size, cut in zip(leaf.shape, cuts, strict=True))
    return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)


# Each is jitted by itself, so that it is traced, lowered and (its kernels) compiled once for all
# layers and not once for each; XLA inlines it into the step.


@functools.partial(jax.jit, static_argnames=("kernel", "problem"))
def _run(operands, *, kernel: Kernel, problem: Problem):
    return kernel.run(problem, *operands)


@functools.partial(
    jax.jit,
    static_argnames=("tree", "kernel", "problem", "mesh", "in_specs", "out_specs", "out_tree"),
)
def _run_sharded(
    flat, *, tree, kernel: Kernel, problem: Problem, mesh, in_specs, out_specs, out_tree
):
    def run(*parts):
        return kernel.run(problem, *jax.tree.unflatten(tree, parts))

    return jax.shard_map(
        run,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=jax.tree.unflatten(out_tree, out_specs),
        check_vma=False,
    )(*flat)
