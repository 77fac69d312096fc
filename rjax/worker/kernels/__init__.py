"""The kernels of products, experts and layers, and the choice between all kernels."""

from rjax.worker.kernels.dispatcher import Choice, Dispatcher

__all__ = ["Choice", "Dispatcher"]
