"""``jax_triton.triton_call`` on the CPU, by Triton's interpreter."""

import jax
import numpy as np
from triton.runtime import interpreter

_NAMES = {"float16": "fp16", "float32": "fp32", "int32": "i32", "uint8": "u8"}


class Buffer:
    """As much of a torch tensor as the interpreter asks for, over NumPy memory."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.dtype = _NAMES[array.dtype.name]

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> "Buffer":
        return self

    def cpu(self) -> "Buffer":
        return self

    def new_empty(self, *size, **options) -> "Buffer":
        return Buffer(self.array)

    def set_(self, *layout) -> None: ...

    def copy_(self, other) -> None: ...

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return self.array.strides


def triton_call(
    *args, kernel, out_shape, grid, num_warps, num_stages, input_output_aliases=None, **constants
):
    """Outputs that are no inputs hold NaN before."""
    sources = {output: source for source, output in (input_output_aliases or {}).items()}

    def run(*arrays):
        values = iter(arrays)
        given = [a if isinstance(a, int) else Buffer(np.array(next(values))) for a in args]
        results = [
            given[sources[i]] if i in sources else Buffer(np.full(s.shape, np.nan, s.dtype))
            for i, s in enumerate(out_shape)
        ]
        with np.errstate(all="ignore"):
            kernel[grid](*given, *results, **constants)
        return tuple(result.array for result in results)

    shapes = tuple(jax.ShapeDtypeStruct(s.shape, s.dtype) for s in out_shape)
    return jax.pure_callback(run, shapes, *(a for a in args if not isinstance(a, int)))


def allow_numpy_scalars(monkeypatch) -> None:
    """The interpreter's loop bounds are arrays of one element; NumPy 2.5 converts none."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
