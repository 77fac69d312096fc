"""Weight schemes: how the weight of a `Linear` is stored, for each quantisation format."""

from rjax.models.schemes.registry import read_scheme, register_scheme, scheme_names
from rjax.models.schemes.scheme import Leaf, WeightScheme
from rjax.models.schemes.unquantised import UNQUANTISED, Unquantised

__all__ = [
    "UNQUANTISED",
    "Leaf",
    "Unquantised",
    "WeightScheme",
    "read_scheme",
    "register_scheme",
    "scheme_names",
]
