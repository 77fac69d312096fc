"""Checks of the values of stored tensors, on the host before anything is loaded."""

import numpy as np


def check_scale(values: np.ndarray) -> str | None:
    """A problem of scales: a zero, an infinity or a NaN among them."""
    wide = values.astype(np.float32)
    if not np.isfinite(wide).all():
        return "has scales that are not finite"
    return "has scales that are zero" if not wide.all() else None


def check_positive_scale(values: np.ndarray) -> str | None:
    """A problem of scales that a softmax needs to be positive, beside those of `check_scale`."""
    return check_scale(values) or ("has scales that are negative" if (values < 0).any() else None)


def check_order(groups: np.ndarray, group: int) -> str | None:
    """A problem of the group of each input: another order than that of the inputs."""
    if np.array_equal(groups, np.arange(len(groups)) // group):
        return None
    return (
        "orders the inputs by activation (desc_act, actorder), which is not supported; use a "
        "checkpoint quantised without it"
    )
