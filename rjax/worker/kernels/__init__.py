"""The problems that the modules of a layer pose, and the choice of their kernels."""

from rjax.worker.kernels.dispatcher import Choice, Dispatcher

__all__ = ["Choice", "Dispatcher"]
