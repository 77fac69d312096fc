"""Weight schemes: how the weight of a `Linear` is stored on the devices."""

from rjax.models.schemes import fp8, integers  # noqa: F401 - they register themselves
from rjax.models.schemes.mxfp4 import MXFP4
from rjax.models.schemes.scaled import ON_LOAD, Scaled
from rjax.models.schemes.scheme import Leaf, WeightScheme
from rjax.models.schemes.unquantised import UNQUANTISED, Unquantised

__all__ = ["MXFP4", "ON_LOAD", "UNQUANTISED", "Leaf", "Scaled", "Unquantised", "WeightScheme"]
