"""The ring of tiles in shared memory, which the producer fills and the consumers read."""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu


@dataclasses.dataclass(frozen=True, slots=True)
class Ring:
    """Slots of two [64, H] tiles of keys or of values, taken in turn.

    halves: [slots, 2, 64, H] SMEM; whole: the same memory as [slots, 128, H]. full: barriers, one a
    slot, that its tiles have come; free: that both consumers have read them. slots: how many.
    """

    halves: Any
    whole: Any
    full: Any
    free: Any
    slots: int

    def of_step(self, first, step):
        """Slots of the keys and the values of a unit's step, whose first keys are in ``first``."""
        return (lax.rem(first + 2 * step + n, jnp.int32(self.slots)) for n in range(2))

    def wait(self, slot) -> None:
        """Until the slot's tiles have come."""
        plgpu.barrier_wait(self.full.at[slot])

    def give_back(self, slot) -> None:
        """This warpgroup has read the slot."""
        plgpu.barrier_arrive(self.free.at[slot])
