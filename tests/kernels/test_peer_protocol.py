"""The exchange of shares on a model of devices whose accesses happen in any order."""

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rjax.pallas_kernels.residual import peers

_ROWS = 3  # words of a share, one a row


class Device:
    """The buffer of a device and the part of its call that is still to do.

    An access is a function that returns whether it happened: a take waits for its word.
    """

    def __init__(self, rank: int) -> None:
        self.rank, self.call = rank, 0
        self.memory: dict[tuple[int, int, int], int | None] = {}  # by region, sender, word
        self.accesses: list = []


def one_call(device: Device, devices: list, flying: list, regions: int, two_shot: bool) -> list:
    """The accesses of a call: pushes, restores and takes."""
    call, rank, n = device.call, device.rank, len(devices)
    region, before = call % regions, (call - 1) % regions

    def push(receiver, word):
        flying.append((receiver, (region, rank, word), call))
        return True

    def take(sender, word):
        found = device.memory.get((region, sender, word))
        assert found in (None, call), f"call {call} took a word of call {found}"
        return found is not None

    def restore(key):
        assert device.memory[key] == call - 1, "restored a word of another call"
        device.memory[key] = None
        return True

    owner = {row: devices[row % n] for row in range(_ROWS)}
    used = [key for key, value in device.memory.items() if key[0] == before and value is not None]
    clear = [lambda key=key: restore(key) for key in used] if call else []
    if not two_shot:
        sends = [lambda d=d, w=w: push(d, w) for d in devices for w in range(_ROWS)]
        takes = [lambda s=s, w=w: take(s, w) for s in range(n) for w in range(_ROWS)]
        return [sends, clear, takes]
    sends = [lambda w=w: push(owner[w], w) for w in range(_ROWS)]

    def add_owned(word):
        return all(take(s, word) for s in range(n)) and all(push(d, _ROWS + word) for d in devices)

    owned = [lambda w=w: add_owned(w) for w in range(_ROWS) if owner[w] is device]
    takes = [lambda w=w: take(owner[w].rank, _ROWS + w) for w in range(_ROWS)]
    return [sends, clear, owned, takes]


def run(seed: int, n: int, regions: int, calls: int = 9) -> None:
    """All devices make the same calls; raises where one takes, loses or restores a wrong word."""
    rng = random.Random(seed)
    shots = [rng.random() < 0.5 for _ in range(calls)]
    devices = [Device(rank) for rank in range(n)]
    flying: list = []
    weights = [rng.choice((1, 1, 20)) for _ in range(n)]  # some devices are slow
    while any(device.call < calls for device in devices) or flying:
        if flying and rng.random() < 0.5:
            receiver, key, call = flying.pop(rng.randrange(len(flying)))
            assert receiver.memory.get(key) is None, "a word arrived before it was restored"
            receiver.memory[key] = call
            continue
        [device] = rng.choices(devices, weights)
        if not device.accesses:
            if device.call == calls:
                continue
            phases = one_call(device, devices, flying, regions, shots[device.call])
            device.accesses = [phase for phase in phases if phase]
        # One CTA may take while another still pushes.
        phase = rng.choice(device.accesses)
        access = rng.randrange(len(phase))
        if phase[access]():
            phase.pop(access)
            device.accesses = [phase for phase in device.accesses if phase]
            device.call += not device.accesses


def run_all(seeds: int, devices: int, regions: int) -> None:
    for seed in range(seeds):
        run(seed, devices, regions)


@pytest.mark.parametrize("devices", [2, 3])
def test_no_word_is_lost_or_taken_twice(devices):
    run_all(30, devices, peers.REGIONS)


def test_two_regions_would_lose_words():
    with pytest.raises(AssertionError, match="before it was restored"):
        run_all(100, 2, regions=2)


@given(
    devices=st.integers(2, 9),
    rows=st.integers(1, 700),
    columns=st.sampled_from([128, 896, 4096, 8192, 16384]),
)
@example(devices=4, rows=700, columns=128)  # whose largest one-shot update is an odd number
def test_every_update_of_the_capacity_has_room(devices, rows, columns):
    capacity = peers.update_capacity(devices)
    if rows * columns <= capacity:
        used = peers.used_words(devices, rows, columns)
        assert used <= peers.slot_words(devices, capacity)
        pushed = used * (devices - 1) * 4
        assert pushed <= peers.MAX_PUSHED_BYTES + 8 * devices * columns
    smaller = -(-rows * columns // 128) * 128  # of an engine with few rows
    used = peers.used_words(devices, rows, columns)
    assert used <= peers.slot_words(devices, min(smaller, capacity)) or smaller > capacity
    assert peers.slot_words(devices, min(smaller, capacity)) % 4 == 0  # of vectors
