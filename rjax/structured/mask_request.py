"""MaskRequest: asks an engine for the token masks of a constraint."""

import dataclasses
import math

from rjax.structured.constraint import Constraint


@dataclasses.dataclass(frozen=True, slots=True)
class MaskRequest:
    """A constraint on every sample of a request.

    Attributes:
        constraint: the constraint that the text must match.
        seconds: initial time budget of the request's masks, see
            `rjax.structured.mask_budget.MaskBudget`.
        num_bytes: memory that its compilation takes, for the bound of the cache; 0 if unknown.
        owner: owner of the request. Requests of different owners do not affect each other's masks.
        one_mask_seconds: most time of one mask.
        owner_seconds: most time of slow masks of all requests of the owner within a minute.
    """

    constraint: Constraint
    seconds: float = math.inf
    num_bytes: int = 0
    owner: str = ""
    one_mask_seconds: float = math.inf
    owner_seconds: float = math.inf
