"""Which program takes which units, and when."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True, slots=True)
class Turns:
    """A program's turns at the units of a packed plan; all are int32 but the static ones.

    Program p takes units p, p + programs, p + 2 * programs, ... In a last round of fewer units than
    programs, of paired ones only, the last programs have their turn: the first have wide units.

    Attributes:
        program: its number.
        programs: static; in the launch.
        rounds: in which all programs have a turn.
        in_last: its place in a last round.
        count: units that it takes.
        backwards: bool, it takes them from their end; None where no plan asks for that.
    """

    program: Any
    programs: int
    rounds: Any
    in_last: Any
    count: Any
    backwards: Any

    @classmethod
    def of(cls, program, programs: int, order: Any, turns: bool) -> "Turns":
        """order: int32 [3], live units, wide ones, and whether every second program goes backwards,
        which counts only with ``turns``."""
        rounds, rest = (f(order[0], jnp.int32(programs)) for f in (lax.div, lax.rem))
        in_last = jnp.where(order[0] - rest >= order[1], programs - 1 - program, program)
        count = rounds + (in_last < rest).astype(jnp.int32)
        backwards = (lax.rem(program, 2) == 1) & (order[2] != 0) if turns else None
        return cls(program, programs, rounds, in_last, count, backwards)

    def unit(self, number):
        """The unit of this program's turn ``number``. From ``count`` on that means nothing, and may
        lie behind the last unit."""
        if self.backwards is not None:
            number = jnp.where(self.backwards, jnp.maximum(self.count - 1 - number, 0), number)
        place = jnp.where(number < self.rounds, self.program, self.in_last)
        return place + number * self.programs
