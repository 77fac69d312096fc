"""Options of XLA for a CPU by which tests compile quickly."""

import os

import jax


def set_flags() -> None:
    """To be called before JAX starts its backend; processes that are started inherit it.

    MLIR makes each fusion's kernel in a context of its own, whose start alone takes longer than the
    older emitter needs for all kernels of a tiny model. LLVM's expensive passes take a third of the
    time of compiling, and the bundled model answers as quickly without them.
    """
    flags = (
        os.environ.get("XLA_FLAGS", ""),
        "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
        # Of programs that LLVM optimises.
        "--xla_backend_optimization_level=2",
        "--xla_llvm_disable_expensive_passes=true",
    )
    os.environ["XLA_FLAGS"] = " ".join(flags).strip()


def optimise(value: bool) -> None:
    """Whether LLVM optimises: it takes longer than it gives back in most tests."""
    jax.config.update("jax_disable_most_optimizations", not value)
