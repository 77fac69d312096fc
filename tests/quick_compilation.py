"""Options of XLA for a CPU by which tests compile quickly."""

import os

import jax

_OLDER_EMITTER = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
_FEW_PASSES = "--xla_backend_optimization_level=2 --xla_llvm_disable_expensive_passes=true"


def set_flags() -> None:
    """To be called before JAX starts its backend; processes that are started inherit it.

    MLIR makes each fusion's kernel in a context of its own, whose start alone takes longer than the
    older emitter needs for all kernels of a tiny model. Where LLVM optimises, it leaves out its
    expensive passes: the bundled model answers as quickly without them.
    """
    flags = (os.environ.get("XLA_FLAGS", ""), _OLDER_EMITTER, _FEW_PASSES)
    os.environ["XLA_FLAGS"] = " ".join(flags).strip()


def optimise(value: bool) -> None:
    """Whether LLVM optimises: it takes longer than it gives back in most tests."""
    jax.config.update("jax_disable_most_optimizations", not value)


def process_environment(*, optimised: bool) -> dict[str, str]:
    """Variables that a process of a test adds to its own.

    Args:
        optimised: for a process that computes for longer than it compiles. For the kernels of the
            bundled model, LLVM takes twice as long after the older emitter as after MLIR's.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    return {
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "0" if optimised else "1",
        "XLA_FLAGS": flags.replace(_OLDER_EMITTER, "") if optimised else flags,
    }
