"""Pairs of parameters, of which a default run takes some."""

from collections.abc import Sequence
from typing import Any

import pytest


def crossed(rows: Sequence[Any], columns: Sequence[Any], every: int) -> list[Any]:
    """Each row with each column; every so-many-th of them by default, so that each row and each
    column has its turn, and the rest among the slow tests."""
    return [
        pytest.param(row, column, marks=[pytest.mark.slow] if (i + j) % every else [])
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
    ]
