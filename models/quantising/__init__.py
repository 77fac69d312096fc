"""Quantising: read an unquantised checkpoint, write a quantised one."""

from rjax.models.quantising.checkpoint import (
    ModuleError,
    QuantisedCheckpoint,
    check_output,
    quantise_checkpoint,
)
from rjax.models.quantising.settings import (
    GROUP_SIZES,
    SCHEMES,
    QuantisingScheme,
    QuantisingSettings,
    choose_settings,
)

__all__ = [
    "GROUP_SIZES",
    "SCHEMES",
    "ModuleError",
    "QuantisedCheckpoint",
    "QuantisingScheme",
    "QuantisingSettings",
    "check_output",
    "choose_settings",
    "quantise_checkpoint",
]
