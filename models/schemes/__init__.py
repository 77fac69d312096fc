"""Weight schemes: how the weight of a `Linear` is stored on the devices."""

from rjax.models.schemes.scaled import MXFP4, Scaled
from rjax.models.schemes.scheme import Leaf, WeightScheme
from rjax.models.schemes.unquantised import UNQUANTISED, Unquantised

__all__ = ["MXFP4", "UNQUANTISED", "Leaf", "Scaled", "Unquantised", "WeightScheme"]
