"""No header escapes: each is refused in words, or read as the safetensors library reads it."""

import json
import struct

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxattn.models.checkpoint.safetensors_header import (
    DTYPES,
    SafetensorsHeader,
    check_layout,
    read_header,
)

TENSORS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, jnp.bfloat16)}
CONTENT = safetensors.numpy.save(TENSORS, metadata={"k": "v"})
SUBJECTS = ("is cut off ", "has a header of ", "has a damaged header: ", "is damaged: ")


def packed(header: object, data: bytes = bytes(32)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(**changes) -> dict:
    return {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]} | changes


def read(content: bytes) -> SafetensorsHeader:
    header = read_header(np.frombuffer(content, np.uint8))
    check_layout(header)
    return header


def test_a_header_is_read_as_it_was_written():
    header = read(CONTENT)
    assert header.metadata == {"k": "v"}
    for name, tensor in header.tensors.items():
        data = header.data[tensor.begin : tensor.end].view(jnp.dtype(tensor.dtype))
        np.testing.assert_array_equal(data.reshape(tensor.shape), TENSORS[name])


TWICE = b'{"a": %s, "a": %s}' % ((json.dumps(entry()).encode(),) * 2)
DAMAGED = {
    "no bytes": (b"", "is cut off or not a safetensors file: it ends after 0 bytes"),
    "half a length": (b"\1\0", "is cut off or not a safetensors file: it ends after 2 bytes"),
    "huge length": (struct.pack("<Q", 2**64 - 1) + b"{}", "is cut off or not a safetensors file"),
    "no json": (packed(b"{"), "has a damaged header: Expecting"),
    "no utf-8": (packed(b'{"\xff": 1}'), "has a damaged header: 'utf-8' codec"),
    "utf-16": (packed('{"a": 1}'.encode("utf-16")), "has a damaged header: 'utf-8' codec"),
    "a list": (packed([1]), r"damaged header: it is not a JSON object but \[1\]"),
    "nested lists": (packed(b"[" * 100_000), "damaged header: it is nested too deeply"),
    "nested objects": (packed(b'{"a":' * 100_000), "damaged header: it is nested too deeply"),
    "many digits": (packed(b'{"a": %s}' % (b"9" * 5000)), "damaged header: Exceeds the limit"),
    "metadata list": (
        packed({"__metadata__": []}),
        r"__metadata__ must be an object of strings.*\[",
    ),
    "metadata null": (packed({"__metadata__": None}), "__metadata__ must be .*; got None"),
    "metadata number": (packed({"__metadata__": {"k": 1}}), "__metadata__ must be .* {'k': 1}"),
    "twice": (packed(TWICE), "damaged header: it contains 'a' twice"),
    "twice inside": (packed(b'{"a": {"shape": [], "shape": []}}'), "it contains 'shape' twice"),
    "no object": (packed({"a": [1]}), r"tensor 'a' must be an object with dtype, shape and .* \[1"),
    "no dtype": (packed({"a": {"shape": [8]}}), "tensor 'a' must be an object with dtype"),
    "more keys": (packed({"a": entry(order="C")}), "tensor 'a' must be an object with dtype"),
    "dtype": (packed({"a": entry(dtype=7)}), "tensor 'a': dtype must be a string; got 7"),
    "shape": (packed({"a": entry(shape="many")}), "'a': shape must be a list; got 'many'"),
    "bool": (packed({"a": entry(shape=[8, True])}), r"'a': shape\[1\] must be an integer .* True"),
    "float": (packed({"a": entry(shape=[8.0])}), r"shape\[0\] must be an integer .* 8.0"),
    "negative": (packed({"a": entry(shape=[-8, -1])}), r"shape\[0\] must be an integer .* got -8"),
    "infinite": (
        packed(b'{"a": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 0]}}'),
        "inf",
    ),
    "one offset": (packed({"a": entry(data_offsets=[0])}), "data_offsets must be two integers"),
    "offsets": (packed({"a": entry(data_offsets=None)}), "data_offsets must be two integers"),
    "negative offset": (packed({"a": entry(data_offsets=[-32, 0])}), r"data_offsets\[0\] must be"),
    "float offset": (packed({"a": entry(data_offsets=[0, 32.0])}), r"data_offsets\[1\] must be"),
    "backwards": (packed({"a": entry(data_offsets=[32, 0])}), r"end before they begin; got \[32"),
    "size": (packed({"a": entry(shape=[2])}), r"'a' has 32 bytes, but float32\[2\] needs 8"),
    "beyond": (packed({"a": entry()}, bytes(31)), "is cut off within tensor 'a', which ends 32"),
    "trailing": (packed({"a": entry()}, bytes(40)), "is damaged: 8 bytes after tensor 'a' belong"),
    "only bytes": (packed({}), "is damaged: 32 bytes after the header belong to no tensor"),
    "gap": (
        packed({"a": entry(shape=[1], data_offsets=[0, 4]), "b": entry(data_offsets=[8, 40])}),
        "is damaged: 4 bytes between tensor 'a' and tensor 'b' belong to no tensor",
    ),
    "gap before": (packed({"a": entry(shape=[6], data_offsets=[8, 32])}), "8 bytes between the he"),
    "overlap": (
        packed({"a": entry(), "b": entry(shape=[4], data_offsets=[16, 32])}),
        "is damaged: tensor 'b' overlaps tensor 'a'",
    ),
    "the same bytes": (packed({"a": entry(), "b": entry()}), "tensor 'b' overlaps tensor 'a'"),
}


@pytest.mark.parametrize("content, message", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_refused_in_words(content, message):
    with pytest.raises(ValueError, match=message) as told:
        read(content)
    assert str(told.value).startswith(SUBJECTS) and len(str(told.value)) < 500


def test_a_header_longer_than_the_library_reads_is_refused(monkeypatch):
    monkeypatch.setattr("jaxattn.models.checkpoint.safetensors_header.MOST_HEADER_BYTES", 20)
    with pytest.raises(ValueError, match="has a header of .* bytes; at most 20 are supported"):
        read(CONTENT)


def agrees_with_the_library(content: bytes) -> bool:
    """Whether the file is accepted; then the library has to accept the same tensors."""
    try:
        header = read_header(np.frombuffer(content, np.uint8))
        if not {tensor.dtype for tensor in header.tensors.values()} <= set(DTYPES.values()):
            return False  # the loader compares dtypes before it looks at the layout
        check_layout(header)
    except ValueError as error:
        assert str(error).startswith(SUBJECTS)
        return False
    theirs = dict(safetensors.deserialize(content))
    assert theirs.keys() == header.tensors.keys()
    for name, (_, shape, begin, end) in header.tensors.items():
        assert tuple(theirs[name]["shape"]) == shape
        assert bytes(theirs[name]["data"]) == header.data[begin:end].tobytes()
    return True


small = st.integers(-1, 9) | st.booleans() | st.just(4.0) | st.just(2**70)
numbers = st.lists(st.integers(0, 8), max_size=3)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
entries = json_values | st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "I64", "F4"]) | json_values,
        "shape": numbers | st.lists(small, max_size=3) | json_values,
        "data_offsets": st.lists(st.integers(0, 40), min_size=2, max_size=2) | json_values,
    }
)
headers = json_values | st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), entries)


@settings(deadline=None, max_examples=150)
@given(headers, st.integers(0, 40))
@example({"a": entry()}, 32)
@example({"a": entry(shape=[0], data_offsets=[0, 0]), "__metadata__": {}}, 0)
def test_no_header_escapes(header, size):
    agrees_with_the_library(packed(header, bytes(size)))


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(st.integers(0, len(CONTENT) - 1), st.integers(0, 255)), max_size=3))
def test_no_changed_bytes_escape(changes):
    content = bytearray(CONTENT)
    for place, byte in changes:
        content[place] = byte
    agrees_with_the_library(bytes(content))


def test_no_part_of_a_file_is_a_file():
    for keep in range(len(CONTENT)):
        assert not agrees_with_the_library(CONTENT[:keep])


@settings(deadline=None, max_examples=50)
@given(st.dictionaries(st.text(max_size=5), st.sampled_from(list(TENSORS.values())), max_size=4))
def test_what_the_library_writes_is_accepted(tensors):
    tensors.pop("__metadata__", None)
    assert agrees_with_the_library(safetensors.numpy.save(tensors))
