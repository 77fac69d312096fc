"""Options of XLA for a CPU by which tests compile quickly."""

import os

import jax


def set_flags() -> None:
    """To be called before JAX starts its backend; processes that are started inherit it.

    MLIR makes each fusion's kernel in a context of its own, whose start alone takes longer than the
    older emitter needs for all kernels of a tiny model.
    """
    older_emitter = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {older_emitter}".strip()


def optimise(value: bool) -> None:
    """Whether LLVM optimises: it takes longer than it gives back in most tests."""
    jax.config.update("jax_disable_most_optimizations", not value)
