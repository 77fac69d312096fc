"""KV events, read over ZeroMQ by a reader that knows only vLLM's wire format."""

import hashlib
import threading
import time
from collections.abc import Callable

import msgpack
import numpy as np
import pytest
import zmq

from rjax.config import CacheSettings
from rjax.config.kv_events import KvEventsConfig
from rjax.engine.kv_events import publisher
from rjax.engine.kv_events.event_log import Removed, Stored
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
    ],
    "BlockRemoved": ["block_hashes", "medium"],
    "AllBlocksCleared": [],
}
REQUIRED = {"BlockStored": 7, "BlockRemoved": 2, "AllBlocksCleared": 0}


class Reader:
    """Subscribes, and keeps the hashes that the events say are stored."""

    def __init__(self, endpoint: str, topic: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self.socket.connect(endpoint)
        self.stored: set[bytes] = set()
        self.tokens: dict[bytes, list[int]] = {}
        self.parents: dict[bytes, bytes | None] = {}
        self.extra: dict[bytes, object] = {}
        self.numbers: list[int] = []
        self.kinds: list[str] = []

    def read(self, until: Callable[[], bool]) -> None:
        """Read until `until` holds, or nothing comes for 20 seconds."""
        while not until() and self.socket.poll(20_000):
            topic, number, payload = self.socket.recv_multipart()
            assert topic == b"kv@test"
            assert len(number) == 8
            self.numbers.append(int.from_bytes(number, "big"))
            self.apply(payload)

    def apply(self, payload: bytes) -> None:
        seconds, events, rank = msgpack.unpackb(payload)
        assert abs(time.time() - seconds) < 60
        assert rank == 0
        for event in events:
            if isinstance(event, list):
                kind, *values = event
            else:
                kind = event.pop("type")
                assert [*event] == FIELDS[kind][: len(event)]
                values = list(event.values())
            assert REQUIRED[kind] <= len(values) <= len(FIELDS[kind])
            fields = dict(zip(FIELDS[kind], values, strict=False))
            self.kinds.append(kind)
            if kind == "BlockStored":
                self.store(fields)
            elif kind == "BlockRemoved":
                assert fields["medium"] == "GPU"
                self.stored -= set(fields["block_hashes"])
            else:
                self.stored.clear()

    def store(self, fields: dict) -> None:
        hashes, size = fields["block_hashes"], fields["block_size"]
        assert size == S
        assert len(fields["token_ids"]) == size * len(hashes)
        assert (fields["lora_id"], fields["medium"], fields["lora_name"]) == (None, "GPU", None)
        extra = fields.get("extra_keys") or [None] * len(hashes)
        assert len(extra) == len(hashes)
        parent = fields["parent_block_hash"]
        for n, key in enumerate(hashes):
            assert len(key) == 32
            self.parents[key], parent = parent, key
            self.tokens[key] = fields["token_ids"][n * size : (n + 1) * size]
            self.extra[key] = extra[n]
            self.stored.add(key)

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture(params=["map", "array"])
def publishing(request, tmp_path):
    """An engine of 16 pages with events, and a reader that has subscribed."""
    config = KvEventsConfig(
        enable_kv_cache_events=True,
        endpoint=f"ipc://{tmp_path}/events",
        replay_endpoint=f"ipc://{tmp_path}/replay",
        topic="kv@test",
        event_format=request.param,
        buffer_steps=1000,
    )
    engine = fake_engine(
        num_pages=16, page_size=S, vocab=32, max_model_len=32, kv_events_config=config
    )
    reader = Reader(config.endpoint, "kv@")
    time.sleep(0.2)  # a subscription takes effect once the publisher has got it
    yield engine, reader, config
    engine.close()
    reader.close()


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
    assert reader.numbers == list(range(len(reader.numbers)))
    for key in reader.stored:
        parent = reader.parents[key]
        before = engine._root if parent is None else parent
        block = np.asarray(reader.tokens[key], np.int32).tobytes()
        assert hashlib.sha256(before + block).digest() == key
    engine.reset_prefix_cache()
    reader.read(lambda: not reader.stored)
    assert reader.kinds[-1] == "AllBlocksCleared"
    assert reader.stored == cached(engine) == set()
    run(engine, [shared])
    assert engine.stats().kv_event_batches_dropped == 0
    assert engine.stats().kv_event_batches >= len(reader.numbers)


def test_a_salted_chain_begins_with_its_root_key_and_not_with_the_salt(publishing):
    engine, reader, _ = publishing
    run(engine, [[1, 2, 3, 4, 5, 6, 7, 8, 9]], cache_salt="of a tenant")
    run(engine, [[1, 2, 3, 4, 5, 6, 7, 8, 9]])
    reader.read(lambda: reader.stored == cached(engine))
    firsts = [key for key in reader.stored if reader.parents[key] is None]
    root = engine._salted_root("of a tenant").hex()
    assert sorted(map(str, (reader.extra[key] for key in firsts))) == sorted(
        ["None", f"['{root}']"]
    )
    assert all(reader.extra[key] is None for key in reader.stored if key not in firsts)


def test_missed_batches_can_be_replayed(publishing):
    engine, reader, config = publishing
    for i in range(3):
        run(engine, [[i] * 9])
    reader.read(lambda: reader.stored == cached(engine))
    asking = reader.context.socket(zmq.DEALER)  # a REQ socket takes one answer only
    asking.connect(config.replay_endpoint)
    late = Reader(config.endpoint, "none")
    asking.send_multipart((b"", (1).to_bytes(8, "big")))
    numbers = []
    while True:
        assert asking.poll(5000)
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
    begin = time.monotonic()
    good.send_multipart((b"", (0).to_bytes(8, "big")))
    assert good.poll(3000)
    assert time.monotonic() - begin < 3
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
    go = threading.Event()

    def slow(*given, **options):
        assert go.wait(20)
        return batch(*given, **options)

    monkeypatch.setattr(publisher, "batch", slow)
    config = KvEventsConfig(
        enable_kv_cache_events=True,
        endpoint=f"ipc://{tmp_path}/events",
        max_queue_size=2,
        topic="kv@test",
    )
    sender = publisher.KvEventPublisher(config, S, b"root")
    reader = Reader(config.endpoint, "")
    time.sleep(0.2)
    start = time.monotonic()
    for _ in range(10):
        sender.publish([Removed(b"k" * 32)])
        time.sleep(0.02)
    assert time.monotonic() - start < 5
    go.set()
    reader.read(lambda: len(reader.numbers) == 3)
    sender.publish([Removed(b"k" * 32)])
    reader.read(lambda: len(reader.numbers) == 4)
    sender.close()
    reader.close()
    assert sender.dropped == 10 - 3  # one in the thread, two in the queue
    assert reader.numbers == [0, 1, 2, 10]


def test_pages_of_one_chain_are_one_event():
    def page(key, parent, first=False):
        return Stored(key, parent, np.arange(S, dtype=np.int32).tobytes(), first)

    events = [page(b"a", b"r", True), page(b"b", b"a"), page(b"x", b"z"), Removed(b"a")]
    _, found, rank = batch(
        [*events, Removed(b"b")], seconds=1.0, rank=3, page_size=S, root=b"r", event_format="map"
    )
    assert rank == 3
    assert [(e["type"], e["block_hashes"]) for e in found] == [
        ("BlockStored", [b"a", b"b"]),
        ("BlockStored", [b"x"]),
        ("BlockRemoved", [b"a", b"b"]),
    ]
    assert found[1]["parent_block_hash"] == b"z"


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
        publisher.KvEventPublisher(config, S, b"root")
    held.destroy(linger=0)
