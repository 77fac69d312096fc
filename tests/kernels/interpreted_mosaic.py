"""Mosaic GEMMs on the CPU: Pallas' GPU interpreter, and models of what it cannot interpret.

The interpreter (jax 0.11.2) has no wgmma with its left operand in registers or with 8-bit floats,
and no functions that emit MLIR. It ignores layouts, L2 policies and when a wgmma ends; those are
checked on a GPU only.
"""

import contextlib
import functools
from typing import Any

import jax
import numpy as np
from jax._src import callback
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret, shared_memory
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rjax.pallas_kernels.gemm.few_bits.interleaving import natural


def store_transposed(ref, value, first, first_row) -> None:
    """As the kernel's function of this name."""
    existing = min(value.shape[1], ref.shape[0])  # a tile ends where the rows do, rounded up to 8
    ref[pl.ds(first_row, existing), pl.ds(first, value.shape[0])] = value.T[:existing]


def store_all(ref, value, layout) -> None:
    """As ``store_strided`` of `mosaic.emit`."""
    del layout
    ref[...] = value


def load_interleaved(tile, first, columns, zero_point, dtype):
    """As the kernel's function of this name."""
    value = natural(tile[...])[:, first : first + columns].astype(dtype)
    return value if zero_point is None else value - zero_point[:, None]


@contextlib.contextmanager
def interpreting(monkeypatch: Any):
    """Mosaic kernels that are traced inside run on the CPU."""
    monkeypatch.setattr(jaxpr_interpret.JaxprInterpreter, "_interpret_wgmma_ref_p", _wgmma_rule)
    monkeypatch.setattr(shared_memory.Barrier, "deallocate", _deallocate)
    for name in ("griddepcontrol_wait", "griddepcontrol_launch_dependents"):
        monkeypatch.setattr(plgpu, name, lambda: None)  # kernels run one after the other
    try:
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(inline_mgpu="ignore")):
            yield
    finally:
        gpu_callbacks.reset_gpu_interpret_mode_state()


def _deallocate(barrier) -> None:
    """Free a barrier with phases that were never waited for.

    The interpreter takes them for an error. In a pipeline they are right: the producer does not
    wait for the consumers to free the last stages, because it does not fill these again.
    """
    with barrier.cv:
        barrier.ref_count -= 1


def _wgmma_rule(self, eqn, token, get_invals):
    acc, a, b, *leaves = get_invals()
    trees = [eqn.params[f"{name}_transforms_tree"] for name in ("acc", "a", "b")]
    trees = [jax.tree.structure([]) if tree is None else tree for tree in trees]
    _, a_transforms, b_transforms = jax.tree.unflatten(jax.tree_util.treedef_tuple(trees), leaves)
    by_value = isinstance(eqn.invars[1].aval, jax.core.ShapedArray)
    if not by_value:
        a, a_transforms = jaxpr_interpret.resolve_ref(eqn.invars[1].aval, a, a_transforms)
    b, b_transforms = jaxpr_interpret.resolve_ref(eqn.invars[2].aval, b, b_transforms)
    return callback.io_callback(
        functools.partial(_wgmma, by_value=by_value, source_info=eqn.source_info),
        gpu_callbacks.TOKEN_SHAPE_DTYPE,
        token=token,
        mesh_location=self.mesh_location,
        thread=self.thread,
        acc=acc,
        a=a,
        a_transforms=a_transforms,
        b=b,
        b_transforms=b_transforms,
    ), []


@gpu_callbacks.fail_on_exception
def _wgmma(
    *, token, mesh_location, thread, acc, a, a_transforms, b, b_transforms, by_value, source_info
):
    memory = gpu_callbacks._get_shared_memory()
    info = gpu_callbacks.memory.GPULoggingInfo(mesh_location, thread, source_info)

    def access(key, transforms):
        key = gpu_callbacks.HostAllocationKey.from_array(key)
        transforms = gpu_callbacks._remove_noop_transforms(transforms)
        return key, memory.access(key, jax.tree.map(int, transforms))

    def read(key, transforms):
        found, _, _ = memory.get_buffer_content(*access(key, transforms), thread, logging_info=info)
        return np.asarray(found)

    left = np.asarray(a) if by_value else read(a, a_transforms)
    before = read(acc, ())
    left, right = (each.astype(before.dtype) for each in (left, read(b, b_transforms)))
    total = before + left @ right
    memory.store_buffer_content(*access(acc, ()), total, thread, logging_info=info)
    return token
