"""Fixtures for GPU tests, and for Triton kernels without a GPU: jax-triton cannot be imported
there, so it is replaced."""

import sys
import types

import jax
import pytest


@pytest.fixture
def hopper():
    """Skips the test elsewhere than on a GPU; the kernels' own errors tell of other GPUs."""
    if jax.default_backend() != "gpu":
        pytest.skip("needs a Hopper GPU")


@pytest.fixture
def stand_in_for_jax_triton(monkeypatch):
    """Takes the function that stands for ``jax_triton.triton_call`` in this test."""

    def install(triton_call) -> None:
        module = types.ModuleType("jax_triton")
        monkeypatch.setattr(module, "triton_call", triton_call, raising=False)
        monkeypatch.setitem(sys.modules, "jax_triton", module)

    return install


@pytest.fixture
def triton_interpreter(monkeypatch, stand_in_for_jax_triton):
    """Triton's interpreter computes every launch; TRITON_INTERPRET=1 has to be set at the start."""
    pytest.importorskip("triton")
    import interpreted

    interpreted.allow_numpy_scalars(monkeypatch)
    stand_in_for_jax_triton(interpreted.triton_call)
