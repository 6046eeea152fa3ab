"""Pickles are read without running anything."""

import io
import pickle
from collections import OrderedDict, defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ness
from lab.datasets.making import python2_pickle
from ness.lab.datasets import pickles
from ness.lab.datasets.reading import Hashing, guarded


def load(raw: bytes) -> object:
    return pickles.load(Hashing(io.BytesIO(raw), len(raw)))


def plain(value: object) -> object:
    """Arrays as lists."""
    if isinstance(value, pickles.Array):
        return value.value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(plain(item) for item in value)
    return value


@pytest.mark.parametrize("protocol", range(6))
def test_reads_what_python_writes(protocol: int) -> None:
    array = np.arange(200_000, dtype=np.uint8).reshape(2, -1)
    value = {
        "data": array,
        "fortran": np.asfortranarray(np.arange(6, dtype=np.int64).reshape(2, 3)),
        "big": np.arange(3, dtype=">i4"),
        "labels": [1, 2, 300, 70_000, -5, 2**40, True, False, None],
        "nested": ({"a": "ä"}, (), [b"bytes", "text\n'quoted'"], (1,), (1, 2), (1, 2, 3, 4)),
        "scalar": np.int64(7),
        "ordered": OrderedDict(a=1),
        "default": defaultdict(list, {"b": [2]}),
    }
    expected = {**value, "data": array.tolist(), "fortran": [[0, 1, 2], [3, 4, 5]], "big": [0, 1, 2]}
    expected |= {"ordered": {"a": 1}, "default": {"b": [2]}}
    assert plain(load(pickle.dumps(value, protocol))) == expected


def test_reads_what_python_2_wrote() -> None:
    array = np.arange(100_000, dtype=np.uint8)
    found = load(python2_pickle({"data": array, "fine_labels": [3, 1], "batch_label": "training batch 1 of 1"}))
    assert plain(found) == {"data": array.tolist(), "fine_labels": [3, 1], "batch_label": "training batch 1 of 1"}


class Hostile:
    def __init__(self, *call: object) -> None:
        self.call = call

    def __reduce__(self) -> tuple[object, object]:
        return self.call[0], self.call[1:]


@pytest.mark.parametrize("protocol", range(6))
def test_refuses_to_call_anything(protocol: int, tmp_path: Path) -> None:
    witness = tmp_path / "ran"
    for value in (
        Hostile(eval, f"open({str(witness)!r}, 'w')"),
        Hostile(open, str(witness), "w"),
        {"data": Hostile(exec, "raise SystemExit")},
        Path("x"),
        np.array([object()], dtype=object),
        np.array([Hostile(open, str(witness), "w")], dtype=object),
        np.dtype([("a", "u1")]),
    ):
        with pytest.raises(ness.NessError, match=r"refused|cannot be read"), guarded(Path("file"), "cifar100"):
            load(pickle.dumps(value, protocol))
    assert not witness.exists()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b".",
        b"\x80\x02",
        b"cos\nsystem\n(S'true'\ntR.",
        b"(S'true'\nios\nsystem\n.",  # INST
        b"\x80\x02cbuiltins\nlist\n)\x81.",  # NEWOBJ
        b"\x80\x02X\xff\xff\xff\xffabc.",  # a string longer than the file
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",  # bytes longer than any memory
        b"\x80\x02T\xff\xff\xff\xff.",  # of negative length
        b"\x80\x02h\x05.",  # memo never filled
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\nR.",
        b"\x80\x02K\x01K\x02R.",
        b"\x80\x02K\x01K\x02b.",
        b"\x80\x02K\x01a.",
        b"\x80\x02K\x01K\x01K\x01s.",
        b"I" + b"9" * 5000 + b"\n.",
        b"S__import__('os')\n.",
        b"e.",
    ],
)
def test_refuses_malformed(raw: bytes) -> None:
    with pytest.raises(ness.NessError), guarded(Path("file"), "cifar100"):
        load(raw)


@settings(deadline=None)
@given(st.binary(max_size=64))
def test_any_bytes_give_a_value_or_our_error(raw: bytes) -> None:
    try:
        with guarded(Path("file"), "cifar100"):
            load(raw)
    except ness.NessError:
        pass


@settings(deadline=None)
@given(st.data())
def test_any_change_gives_a_value_or_our_error(data: st.DataObject) -> None:
    protocol = data.draw(st.integers(0, 5))
    raw = bytearray(pickle.dumps({"data": np.arange(9, dtype=np.uint8), "labels": [1, 2]}, protocol))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    test_any_bytes_give_a_value_or_our_error.hypothesis.inner_test(bytes(raw))
