"""KV events, read over ZeroMQ by a reader that knows only vLLM's wire format."""

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from rjax.batch.step_worker import StatePoolSize
from rjax.config import CacheSettings
from rjax.config.kv_events import KvEventsConfig
from rjax.engine.kv_events import publisher
from rjax.engine.kv_events.event_log import STATES, Removed, Stored
from rjax.engine.kv_events.wire_format import batch
from rjax.errors import InvalidConfigError
from rjax.sampling import SamplingParams

from .fake_worker import fake_engine

S = 4
# The fields of vLLM 0.33's structs, in order; msgspec leaves those with a default out.
FIELDS = {
    "BlockStored": [
        *("block_hashes", "parent_block_hash", "token_ids", "block_size"),
        *("lora_id", "medium", "lora_name", "extra_keys"),
        *("group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
    ],
    "BlockRemoved": ["block_hashes", "medium", "group_idx"],
    "AllBlocksCleared": [],
}
REQUIRED = {"BlockStored": 7, "BlockRemoved": 2, "AllBlocksCleared": 0}


def decoder(event_format: str) -> msgspec.msgpack.Decoder:
    """A decoder of batches with these fields and their types."""

    def event(name: str, **types: Any):
        fields = [
            (field, kind) if n < REQUIRED[name] else (field, kind, None)
            for n, (field, kind) in enumerate(types.items())
        ]
        assert [*types] == FIELDS[name]
        is_array = event_format == "array"
        return msgspec.defstruct(
            name, fields, tag=True, array_like=is_array, forbid_unknown_fields=True
        )

    stored = event(
        "BlockStored",
        block_hashes=list[bytes],
        parent_block_hash=bytes | None,
        token_ids=list[int],
        block_size=int,
        lora_id=int | None,
        medium=str | None,
        lora_name=str | None,
        extra_keys=list[tuple[Any, ...] | None] | None,
        group_idx=int | None,
        kv_cache_spec_kind=str | None,
        kv_cache_spec_sliding_window=int | None,
    )
    removed = event(
        "BlockRemoved",
        block_hashes=list[bytes],
        medium=str | None,
        group_idx=int | None,
    )
    events = stored | removed | event("AllBlocksCleared")
    return msgspec.msgpack.Decoder(tuple[float, list[events], int])


class Reader:
    """Subscribes, and keeps the hashes that the events say are stored: those without a group or of
    group 0, and those of states."""

    def __init__(self, endpoint: str, topic: str, event_format: str = "map") -> None:
        self.decoder = decoder(event_format)
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self.socket.connect(endpoint)
        self.stored: set[bytes] = set()
        self.states: set[bytes] = set()
        self.groups: set[tuple[int | None, str | None]] = set()
        self.tokens: dict[bytes, list[int]] = {}
        self.parents: dict[bytes, bytes | None] = {}
        self.extra: dict[bytes, object] = {}
        self.numbers: list[int] = []
        self.first = 0
        self.kinds: list[str] = []

    def wait_until_subscribed(self, sender: publisher.KvEventPublisher) -> None:
        """Let batches without events be published until one comes: a subscription takes effect once
        the publisher has got it. The next batch has the number ``first``."""
        published = 0
        while not self.socket.poll(50):
            sender.publish([])
            published += 1
            end = time.monotonic() + 60
            while sender.published < published:
                assert time.monotonic() < end
                time.sleep(0.001)
        self.first = published
        self.read(lambda: self.numbers[-1:] == [published - 1])
        self.numbers.clear()

    def read(self, until: Callable[[], bool]) -> None:
        """Read until `until` holds, or nothing comes for a minute."""
        while not until() and self.socket.poll(60_000):
            topic, number, payload = self.socket.recv_multipart()
            assert topic == b"kv@test"
            assert len(number) == 8
            self.numbers.append(int.from_bytes(number, "big"))
            self.apply(payload)

    def apply(self, payload: bytes) -> None:
        seconds, events, rank = self.decoder.decode(payload)
        assert abs(time.time() - seconds) < 60
        assert rank == 0
        for event in events:
            kind = type(event).__name__
            self.kinds.append(kind)
            if kind == "BlockStored":
                self.groups.add((event.group_idx, event.kv_cache_spec_kind))
                self.store(event)
            elif kind == "BlockRemoved":
                assert event.medium == "GPU"
                known = self.states if event.group_idx else self.stored
                known -= set(event.block_hashes)
                assert self.states <= self.stored, "states leave first"
            else:
                self.stored.clear()
                self.states.clear()

    def store(self, event: Any) -> None:
        hashes, size = event.block_hashes, event.block_size
        assert size == S
        assert len(event.token_ids) == size * len(hashes)
        assert (event.lora_id, event.medium, event.lora_name) == (None, "GPU", None)
        extra = event.extra_keys or [None] * len(hashes)
        assert len(extra) == len(hashes)
        parent = event.parent_block_hash
        for n, key in enumerate(hashes):
            assert len(key) == 32
            tokens = event.token_ids[n * size : (n + 1) * size]
            if event.group_idx:
                assert (self.parents[key], self.tokens[key]) == (parent, tokens)
                assert key in self.stored
                self.states.add(key)
            else:
                self.parents[key], self.tokens[key], self.extra[key] = parent, tokens, extra[n]
                self.stored.add(key)
            parent = key

    def close(self) -> None:
        self.context.destroy(linger=0)


@contextlib.contextmanager
def publishing_engine(folder, event_format, **options):
    """An engine of 16 pages with events, and a reader that has subscribed."""
    config = KvEventsConfig(
        enable_kv_cache_events=True,
        endpoint=f"ipc://{folder}/events",
        replay_endpoint=f"ipc://{folder}/replay",
        topic="kv@test",
        event_format=event_format,
        buffer_steps=1000,
    )
    engine = fake_engine(
        num_pages=16, page_size=S, vocab=32, max_model_len=32, kv_events_config=config, **options
    )
    reader = Reader(config.endpoint, "kv@", event_format)
    reader.wait_until_subscribed(engine._kv_events._publisher)
    try:
        yield engine, reader, config
    finally:
        engine.close()
        reader.close()


@pytest.fixture(params=["map", "array"])
def publishing(request, tmp_path):
    with publishing_engine(tmp_path, request.param) as found:
        yield found


def run(engine, prompts, **options) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, detokenize=False)
    for i, prompt in enumerate(prompts):
        engine.add_request(f"{prompt[:2]} {i}", prompt, params, **options)
    while engine.has_unfinished_requests():
        engine.step()


def cached(engine) -> set[bytes]:
    return set(engine._blocks._page_of)


def test_a_reader_knows_what_the_prefix_cache_holds(publishing):
    engine, reader, _ = publishing
    rng = np.random.default_rng(3)
    shared = rng.integers(0, 30, 8).tolist()
    for _ in range(12):  # far more than 16 pages: pages are evicted
        prompts = [shared + rng.integers(0, 30, rng.integers(1, 13)).tolist() for _ in range(2)]
        run(engine, prompts)
        reader.read(lambda: reader.stored == cached(engine))
        assert reader.stored == cached(engine) != set()
    assert "BlockRemoved" in reader.kinds
    assert reader.numbers == list(range(reader.first, reader.first + len(reader.numbers)))
    for key in reader.stored:
        parent = reader.parents[key]
        before = engine._salted_root(None) if parent is None else parent
        block = np.asarray(reader.tokens[key], np.int32).tobytes()
        assert hashlib.sha256(before + block).digest() == key
    engine.reset_prefix_cache()
    reader.read(lambda: not reader.stored)
    assert reader.kinds[-1] == "AllBlocksCleared"
    assert reader.stored == cached(engine) == set()
    run(engine, [shared])
    assert engine.stats().kv_event_batches_dropped == 0
    assert engine.stats().kv_event_batches >= len(reader.numbers)


@pytest.mark.parametrize("event_format", ["map", "array"])
def test_states_are_a_group_of_their_own(tmp_path, event_format):
    states = StatePoolSize(num_states=5, state_bytes=1, snapshot_pages=1, tail_bytes=1)
    rng = np.random.default_rng(3)
    with publishing_engine(tmp_path, event_format, states=states) as (engine, reader, _):
        pool = engine._scheduler.states.pool

        def snapshots() -> set[bytes]:
            return {pool._tree.key(state) for state in pool._tree}

        def agree() -> bool:
            return (reader.stored, reader.states) == (cached(engine), snapshots())

        for salt in [None, "x"] * 6:
            prompts = [rng.integers(0, 30, rng.integers(1, 20)).tolist() for _ in range(2)]
            run(engine, prompts, cache_salt=salt)
            reader.read(agree)
            assert agree()
        assert reader.states
        assert reader.groups == {(0, "full_attention"), (1, "mamba")}
        engine.reset_prefix_cache()
        reader.read(lambda: not reader.stored)
        assert agree()


def test_a_salted_chain_begins_with_its_root_key_and_not_with_the_salt(publishing):
    engine, reader, _ = publishing
    run(engine, [[1, 2, 3, 4, 5, 6, 7, 8, 9]], cache_salt="of a tenant")
    run(engine, [[1, 2, 3, 4, 5, 6, 7, 8, 9]])
    reader.read(lambda: reader.stored == cached(engine))
    firsts = [key for key in reader.stored if reader.parents[key] is None]
    root = engine._salted_root("of a tenant").hex()
    assert len(firsts) == 2
    assert {reader.extra[key] for key in firsts} == {None, (root,)}
    assert all(reader.extra[key] is None for key in reader.stored if key not in firsts)


def test_missed_batches_can_be_replayed(publishing):
    engine, reader, config = publishing
    for i in range(3):
        run(engine, [[i] * 9])
    reader.read(lambda: reader.stored == cached(engine))
    asking = reader.context.socket(zmq.DEALER)  # a REQ socket takes one answer only
    asking.connect(config.replay_endpoint)
    late = Reader(config.endpoint, "none", config.event_format)
    asking.send_multipart((b"", reader.numbers[1].to_bytes(8, "big")))
    numbers = []
    while True:
        assert asking.poll(60_000)
        _, number, payload = asking.recv_multipart()
        if number == b"\xff" * 8:
            break
        numbers.append(int.from_bytes(number, "big"))
        late.apply(payload)
    late.close()
    asking.close(linger=0)
    assert payload == b""
    assert numbers == reader.numbers[1:]
    assert late.stored < reader.stored


def test_malformed_and_huge_requests_delay_nobody(publishing, caplog):
    engine, reader, config = publishing
    run(engine, [[1] * 9])
    reader.read(lambda: bool(reader.numbers))
    bad, good = (reader.context.socket(zmq.DEALER) for _ in range(2))
    for asking in (bad, good):
        asking.connect(config.replay_endpoint)
    for _ in range(500):
        bad.send_multipart((b"", b"seven b"))
    bad.send_multipart((b"", bytes(50_000_000)))
    flood = reader.context.socket(zmq.SUB)
    flood.connect(config.endpoint)
    flood.setsockopt(zmq.SUBSCRIBE, bytes(5_000))
    good.send_multipart((b"", reader.numbers[0].to_bytes(8, "big")))
    assert good.poll(60_000)
    _, number, _ = good.recv_multipart()
    assert int.from_bytes(number, "big") == reader.numbers[0]
    seen = len(reader.numbers)
    run(engine, [[2] * 9])
    reader.read(lambda: len(reader.numbers) > seen)
    assert len(reader.numbers) > seen  # batches still come
    for asking in (bad, good, flood):
        asking.close(linger=0)
    assert caplog.text.count("is not a sequence number") == 1


def test_a_full_queue_drops_batches_and_shows_a_gap(tmp_path, monkeypatch):
    """The engine does not wait, and subscribers see that numbers are missing."""
    go, begun = threading.Event(), threading.Event()

    def slow(*given, **options):
        begun.set()
        assert go.wait(60)
        return batch(*given, **options)

    monkeypatch.setattr(publisher, "batch", slow)
    config = KvEventsConfig(
        enable_kv_cache_events=True,
        endpoint=f"ipc://{tmp_path}/events",
        max_queue_size=2,
        topic="kv@test",
    )
    sender = publisher.KvEventPublisher(config, S, {b"root"})
    reader = Reader(config.endpoint, "")
    go.set()
    reader.wait_until_subscribed(sender)
    go.clear()
    begun.clear()
    for _ in range(10):
        sender.publish([Removed(b"k" * 32)])
        assert begun.wait(60)
    go.set()
    reader.read(lambda: len(reader.numbers) == 3)
    sender.publish([Removed(b"k" * 32)])
    reader.read(lambda: len(reader.numbers) == 4)
    sender.close()
    reader.close()
    assert sender.dropped == 10 - 3  # one in the thread, two in the queue
    assert reader.numbers == [reader.first + i for i in (0, 1, 2, 10)]


def test_pages_of_one_chain_are_one_event():
    def page(key, parent, first=False):
        return Stored(key, parent, np.arange(S, dtype=np.int32).tobytes(), first)

    events = [page(b"a", b"r", True), page(b"b", b"a"), page(b"x", b"z"), Removed(b"a")]
    _, found, rank = batch(
        [*events, Removed(b"b")], seconds=1.0, rank=3, page_size=S, roots={b"r"}, event_format="map"
    )
    assert rank == 3
    assert [(e["type"], e["block_hashes"]) for e in found] == [
        ("BlockStored", [b"a", b"b"]),
        ("BlockStored", [b"x"]),
        ("BlockRemoved", [b"a", b"b"]),
    ]
    assert found[1]["parent_block_hash"] == b"z"


def test_a_state_and_its_page_are_two_events():
    page = Stored(b"a", b"r", np.arange(S, dtype=np.int32).tobytes(), first=True)
    following = page._replace(key=b"b", parent=b"a", first=False)
    events = [page, page._replace(group=STATES), following, Removed(b"a", STATES), Removed(b"b")]
    _, found, _ = batch(
        events,
        seconds=1.0,
        rank=0,
        page_size=S,
        roots={b"r"},
        event_format="map",
        has_states=True,
    )
    assert [(e["type"], e["block_hashes"], e["group_idx"]) for e in found] == [
        ("BlockStored", [b"a"], 0),
        ("BlockStored", [b"a"], 1),
        ("BlockStored", [b"b"], 0),
        ("BlockRemoved", [b"a"], 1),
        ("BlockRemoved", [b"b"], 0),
    ]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{", "give JSON such as"),
        ("[1]", "give JSON such as"),
        ({"enable_kv_events": True}, "the nearest is 'enable_kv_cache_events'"),
        ({"buffer_steps": 0}, "buffer_steps of kv_events_config is 0"),
        ({"publisher": "kafka"}, '"zmq" or "null"'),
        ({"endpoint": "localhost:5557"}, "give an address such as"),
        ({"enable_kv_cache_events": "yes"}, "enable_kv_cache_events"),
    ],
)
def test_wrong_options_are_explained(given, said):
    with pytest.raises(InvalidConfigError, match=said):
        CacheSettings(kv_events_config=given)


def test_events_need_the_prefix_cache():
    with pytest.raises(InvalidConfigError, match="which is off"):
        CacheSettings(
            enable_prefix_caching=False, kv_events_config='{"enable_kv_cache_events": true}'
        )


def test_replicas_have_addresses_of_their_own():
    assert publisher.endpoint_of_rank("tcp://*:5557", 2) == "tcp://*:5559"
    assert publisher.endpoint_of_rank("ipc:///run/kv", 2) == "ipc:///run/kv_dp2"
    assert publisher.endpoint_of_rank("tcp://*:5557", 0) == "tcp://*:5557"


def test_an_address_in_use_is_named(tmp_path):
    held = zmq.Context()
    socket = held.socket(zmq.PUB)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    config = KvEventsConfig(
        enable_kv_cache_events=True,
        endpoint="ipc://" + str(tmp_path / "events"),
        replay_endpoint=f"tcp://127.0.0.1:{port}",
    )
    with pytest.raises(InvalidConfigError, match=f"cannot be used .*{port}"):
        publisher.KvEventPublisher(config, S, {b"root"})
    held.destroy(linger=0)
