"""Who may run now: quick tasks in turn between tenants, slow ones in a few places of their own."""

import asyncio
from collections import OrderedDict, deque

from rjax.errors import OverloadedError


class TaskSlots:
    """The places in which tasks run.

    Waiting tenants take turns for the quick places. Of the slow places one tenant never has all
    where there are several tenants.

    Args:
        quick: places for tasks that begin.
        slow: places for tasks that turned out to take long.
        queued: tasks of one tenant that may wait.
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
        """Wait for a quick place.

        Raises:
            OverloadedError: too many of this tenant's wait, or it took longer than ``seconds``.
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
                self.free()  # the place came too late
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
        """Give a quick place to the next tenant."""
        if not self._waiting:
            self._free += 1
            return
        tenant, own = self._waiting.popitem(last=False)
        turn = own.popleft()
        if own:
            self._waiting[tenant] = own  # behind the others
        turn.set_result(None)

    def take_slow(self, tenant: str) -> bool:
        """Take a slow place, if this tenant may have one."""
        own = self._slow.get(tenant, 0)
        if own >= self._own_slow or sum(self._slow.values()) >= self._most_slow:
            return False
        self._slow[tenant] = own + 1
        return True

    def free_slow(self, tenant: str) -> None:
        """Give a slow place back."""
        self._slow[tenant] -= 1
        if not self._slow[tenant]:
            del self._slow[tenant]


class TaskSlot:
    """The place of one task: a quick one, then perhaps a slow one (``is_slow``)."""

    def __init__(self, slots: TaskSlots, tenant: str) -> None:
        self._slots = slots
        self._tenant = tenant
        self.is_slow = False

    def slow_down(self) -> bool:
        """Move to a slow place; False if there is none."""
        if not self._slots.take_slow(self._tenant):
            return False
        self.is_slow = True
        self._slots.free()
        return True

    def leave(self) -> None:
        """The task has ended."""
        if self.is_slow:
            self._slots.free_slow(self._tenant)
        else:
            self._slots.free()
