"""Invalid headers of safetensors files."""

import json
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from rjax.models.errors import CheckpointError
from rjax.models.loading.tensors import read_header
from tests.properties import num_examples

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def file_of(path, header, data=b"\0" * 8, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def test_reads_what_the_library_writes(tmp_path):
    path = tmp_path / "x.safetensors"
    tensors = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.ones((3, 1), np.float16),
        "scalar": np.array(2.5, np.float64),
        "empty": np.zeros((0, 4), np.float32),
    }
    save_file(tensors, path, metadata={"format": "pt"})
    entries = read_header(path)
    assert entries.keys() == tensors.keys()
    for name, value in tensors.items():
        found = entries[name].read()
        np.testing.assert_array_equal(found, value)
        assert found.dtype == value.dtype
    np.testing.assert_array_equal(entries["a"].read(first_row=1, rows=1), tensors["a"][1:])


def test_well_formed(tmp_path):
    assert read_header(file_of(tmp_path / "x", {"a": F32}))["a"].shape == (2,)


def entry(**changes):
    return {"a": F32 | changes}


@pytest.mark.parametrize(
    "header",
    [
        b"[1, 2]",
        b"{",
        b"\xff\xff",
        b"[" * 100_000,
        b'{"__metadata__": ' + b"[" * 100_000,
        b'{"a": {"dtype": "F32", "shape": [' + b"9" * 5000 + b"]}}",
        b'{"a": %s, "a": %s}' % ((json.dumps(F32).encode(),) * 2),
        {"a": 3},
        {"a": None},
        {"a": {}},
        {"__metadata__": 3, "a": F32},
        entry(dtype="F33"),
        entry(dtype=["F32"]),
        entry(shape=[-2]),
        entry(shape=[2.0]),
        entry(shape=[True, 2]),
        entry(shape="2"),
        entry(shape=[2**63]),
        entry(shape=[2] * 99),
        entry(shape=[3]),
        entry(shape=[2**40, 2**40]),
        entry(data_offsets=[0]),
        entry(data_offsets=[8, 0]),
        entry(data_offsets=[-8, 0]),
        entry(data_offsets=[0, 2**64]),
        entry(data_offsets=[8, 16]),
        entry(data_offsets=[0, 16], shape=[4]),
        {},
        {"a": F32, "b": F32},
        {"a": F32, "b": F32 | {"shape": [1], "data_offsets": [4, 8]}},
    ],
    ids=lambda header: str(header)[:60],
)
def test_lies_are_refused(tmp_path, header):
    with pytest.raises(CheckpointError) as caught:
        read_header(file_of(tmp_path / "x.safetensors", header))
    assert "x.safetensors is not a usable safetensors file: " in str(caught.value)
    assert "download it again" in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 100_000_001, 10**6])
def test_huge_header_length_costs_no_memory(tmp_path, length):
    with pytest.raises(CheckpointError, match=r"header too large|invalid header length"):
        read_header(file_of(tmp_path / "x", {"a": F32}, length=length))


def test_truncated_anywhere(tmp_path):
    path = file_of(tmp_path / "x", {"a": F32})
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            read_header(path)


def test_file_that_shrinks_between_header_and_data(tmp_path):
    path = file_of(tmp_path / "x", {"a": F32})
    found = read_header(path)["a"]
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match="became shorter"):
        found.read()


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)
_ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "F4", "I64"]) | _JSON,
        "shape": st.lists(st.integers(-1, 9), max_size=3) | _JSON,
        "data_offsets": st.lists(st.integers(-1, 40), min_size=2, max_size=2) | _JSON,
    },
)


@settings(max_examples=num_examples(200))
@given(
    header=st.dictionaries(st.text(max_size=4), _ENTRY | _JSON, max_size=4) | _JSON,
    data=st.binary(max_size=40),
)
def test_any_header_is_read_or_refused(tmp_path_factory, header, data):
    path = file_of(tmp_path_factory.mktemp("any") / "x", header, data)
    try:
        entries = read_header(path)
    except CheckpointError:
        return
    assert sum(entry.size for entry in entries.values()) == len(data)
