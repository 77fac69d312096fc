"""The kernels of each operation, and the choice between them."""

from rjax.worker.kernels.dispatcher import Choice, Dispatcher
from rjax.worker.kernels.kernel import Kernel, register_kernel
from rjax.worker.kernels.problem import Problem

__all__ = ["Choice", "Dispatcher", "Kernel", "Problem", "register_kernel"]
