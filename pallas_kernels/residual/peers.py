"""Exchange buffers through which the devices of one process send each other numbers.

Every device has one buffer of int32 words, which all devices of the mesh can address over NVLink:
``REGIONS`` regions, each with one slot per device that sends. The words of a float32 share are
written ("pushed") into the slot of the sender in the buffer of every receiver. A receiver polls its
own memory: an unwritten word holds ``EMPTY``, so every word tells by itself whether it has arrived
(`mosaic.words`). Source: the low-latency protocol of NCCL and the one-shot all-reduce of
TensorRT-LLM.

Calls are numbered, with the same number on every device. Call ``c`` uses region ``c % REGIONS`` and
restores ``EMPTY`` in the words that call ``c - 1`` used. Why three regions are enough, and why
nothing is overwritten before it is read:

1. Calls on one device do not overlap: each takes ``Peers`` from the one before it.
2. Device j writes call c + 1 only after its call c, which read words that device i pushed in its
   call c. Device i started that call after its call c - 1 had ended.
3. So the words that j writes in call c + 1 on i, those of region (c + 1) % 3 = (c - 2) % 3, were
   read by i in call c - 2 and restored by i in call c - 1, which ended before j could write.
4. The words that i restores in call c, of region (c - 1) % 3, have all arrived: i has read each in
   call c - 1. The next to write them is call c + 2, which by (2) begins after i's call c has ended.

With two regions, i could restore in call c what j already writes in call c + 1.
"""

import dataclasses
from typing import no_type_check

import jax
from jaxtyping import Array, Int32

REGIONS = 3

MAX_COLUMNS = 16384
"""Most columns of a row; more would not fit the registers of a CTA."""

MAX_PUSHED_BYTES = 8 << 20
"""Most bytes that a device pushes in one call, to all its peers together; with more, XLA's
collectives are as fast."""

_ONE_SHOT_BYTES = (
    1 << 20
)  # pushed one-shot; with more, two shots of more than two devices are faster


@no_type_check  # JAX also builds it with other leaves than arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Peers:
    """What a call needs to exchange shares; each call returns the value for the next one.

    Both arrays are sharded over the devices along their first axis.

    Attributes:
        table: one entry a device: the addresses of the buffers of devices 0 to X - 1 as (low, high)
            words, then (its index, 0).
        state: one entry a device: (region of the next call, words of a slot that the last call
            used).
        capacity: most numbers of an update.
    """

    table: Int32[Array, "X Z 2"]
    state: Int32[Array, "X 2"]
    capacity: int = dataclasses.field(metadata={"static": True})

    @property
    def devices(self) -> int:
        """Devices that exchange, X."""
        return self.table.shape[1] - 1


def is_two_shot(devices: int, rows: int, columns: int) -> bool:
    """Whether each device adds up 1 / devices of the rows and pushes the sums to the others.

    One-shot, each device gets the shares of all rows from all others. On two devices both move as
    many bytes. Two-shot needs a row for each device, so that each hears from all others in a call.
    """
    pushed = 4 * rows * columns * (devices - 1)
    return devices > 2 and rows >= devices and pushed > _ONE_SHOT_BYTES


def update_capacity(devices: int) -> int:
    """Most numbers of an update for which the exchange is worth it."""
    sent = devices - 1 if devices == 2 else 2 * (devices - 1) / devices
    return int(MAX_PUSHED_BYTES / 4 / max(1, sent)) // 128 * 128


def used_words(devices: int, rows: int, columns: int) -> int:
    """Words of a slot that a call uses."""
    if is_two_shot(devices, rows, columns):
        return 2 * -(-rows // devices) * columns
    return rows * columns


def slot_words(devices: int, capacity: int) -> int:
    """Words of a slot in which every update of at most ``capacity`` numbers has room.

    A multiple of 4, since vectors of 4 words are moved.
    """
    if devices <= 2:
        return capacity
    one_shot = max(devices * MAX_COLUMNS, _ONE_SHOT_BYTES // 4 // (devices - 1))
    two_shot = 2 * (capacity // devices + MAX_COLUMNS)
    return -(-max(min(capacity, one_shot), two_shot) // 4) * 4


def buffer_words(devices: int, capacity: int) -> int:
    """int32 words of one device's buffer, all ``EMPTY`` before the first call."""
    return REGIONS * devices * slot_words(devices, capacity)
