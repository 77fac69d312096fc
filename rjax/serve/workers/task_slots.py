"""Fair scheduling of worker tasks: quick slots shared round-robin by tenants, few slow slots."""

import asyncio
from collections import OrderedDict, deque

from rjax.errors import OverloadedError


class TaskSlots:
    """The slots in which tasks run.

    Waiting tenants get quick slots round-robin. If there are several tenants, one tenant cannot
    occupy all slow slots.

    Args:
        quick: number of slots in which tasks start.
        slow: number of slots for tasks that take long.
        queued: maximum of waiting tasks of one tenant.
        shared: whether there are several tenants.
    """

    def __init__(self, *, quick: int, slow: int, queued: int, shared: bool) -> None:
        self._free = quick
        self._queued = queued
        self._most_slow = slow
        self._own_slow = max(1, slow - 1) if shared else slow
        self._slow: dict[str, int] = {}
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def enter(self, tenant: str, seconds: float) -> "TaskSlot":
        """Wait for a quick slot.

        Raises:
            OverloadedError: the tenant's queue is full, or no slot was free within ``seconds``.
        """
        if self._free and not self._waiting:
            self._free -= 1
            return TaskSlot(self, tenant)
        own = self._waiting.setdefault(tenant, deque())
        if len(own) >= self._queued:
            raise OverloadedError(
                f"{len(own)} texts of yours wait to be read; try again later", "queued_texts"
            )
        turn = asyncio.get_running_loop().create_future()
        own.append(turn)
        try:
            async with asyncio.timeout(seconds):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self.free()  # the slot was assigned too late
            elif turn in own:
                own.remove(turn)
                if not own:
                    self._waiting.pop(tenant, None)
            if isinstance(error, TimeoutError):
                raise OverloadedError(
                    "too many texts wait to be read; try again later", "queued_texts"
                ) from None
            raise
        return TaskSlot(self, tenant)

    def free(self) -> None:
        """Release a quick slot to the next tenant."""
        while self._waiting:
            tenant, own = self._waiting.popitem(last=False)
            turn = own.popleft()
            if own:
                self._waiting[tenant] = own  # at the end of the round
            if not turn.done():  # cancelled, and its task has not run since
                turn.set_result(None)
                return
        self._free += 1

    def take_slow(self, tenant: str) -> bool:
        """Take a slow slot. Return False if this tenant cannot have one."""
        own = self._slow.get(tenant, 0)
        if own >= self._own_slow or sum(self._slow.values()) >= self._most_slow:
            return False
        self._slow[tenant] = own + 1
        return True

    def free_slow(self, tenant: str) -> None:
        """Release a slow slot."""
        self._slow[tenant] -= 1
        if not self._slow[tenant]:
            del self._slow[tenant]


class TaskSlot:
    """The slot of one task: a quick slot, later possibly a slow one (``is_slow``)."""

    def __init__(self, slots: TaskSlots, tenant: str) -> None:
        self._slots = slots
        self._tenant = tenant
        self.is_slow = False

    def slow_down(self) -> bool:
        """Move to a slow slot; return False if there is none."""
        if not self._slots.take_slow(self._tenant):
            return False
        self.is_slow = True
        self._slots.free()
        return True

    def leave(self) -> None:
        """Release the slot."""
        if self.is_slow:
            self._slots.free_slow(self._tenant)
        else:
            self._slots.free()
