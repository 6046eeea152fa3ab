"""A pickle read without running anything: a small machine that knows data, NumPy arrays, and no other callable."""

import ast
import pickle as opcodes
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ness.errors import NessError
from ness.lab.datasets.reading import Hashing

_LONG = 1 << 16  # strings from here on stay raw bytes, in an array


class Global:
    """A name in a pickle: only looked at, never imported."""

    def __init__(self, module: str, name: str) -> None:
        # NumPy 2 moved numpy.core to numpy._core; files of either spelling are read.
        self.path = f"{module}.{name}".replace("numpy._core.", "numpy.core.").replace("__builtin__.", "builtins.")


class Dtype:
    """An integer dtype that is being put together."""

    def __init__(self, code: object) -> None:
        if not isinstance(code, str) or code.lstrip("<>|=") not in (
            "u1",
            "i1",
            "u2",
            "i2",
            "u4",
            "i4",
            "u8",
            "i8",
            "b1",
        ):
            raise NessError(f"a pickle holds an array of type {code!r}, expected integers; refused")
        self.value = np.dtype(code)

    def build(self, state: object) -> None:
        """Take the byte order from (version, order, …)."""
        if not isinstance(state, tuple) or len(state) < 2 or state[1] not in ("<", ">", "|", "="):
            raise ValueError("a dtype's state is not understood")
        self.value = self.value.newbyteorder(state[1])


class Array:
    """An array that is being put together; `value` is set when its bytes arrive."""

    value: NDArray[Any] | None = None

    def build(self, state: object) -> None:
        """Take shape, dtype, order and bytes from (version, shape, dtype, fortran, raw)."""
        if not isinstance(state, tuple) or len(state) != 5:
            raise ValueError("an array's state is not understood")
        _, shape, dtype, fortran, raw = state
        self.fill(raw, dtype, shape, "F" if fortran else "C")

    def fill(self, raw: object, dtype: object, shape: object, order: object) -> None:
        """The array over `raw` itself, without a copy."""
        if not isinstance(dtype, Dtype) or order not in ("C", "F"):
            raise ValueError("an array's dtype or order is not understood")
        if not isinstance(shape, tuple) or not all(type(n) is int and 0 <= n < 1 << 40 for n in shape):
            raise ValueError("an array's shape is not understood")
        self.value = _raw(raw).view(dtype.value).reshape(shape, order="C" if order == "C" else "F")


def _raw(value: object) -> NDArray[np.uint8]:
    if isinstance(value, str):
        value = value.encode("latin-1")
    if isinstance(value, bytes):
        value = np.frombuffer(bytearray(value), np.uint8)
    if not isinstance(value, np.ndarray):
        raise ValueError("an array's bytes are missing")
    return value


def _reconstruct(*_: object) -> Array:
    return Array()


def _from_buffer(raw: object, dtype: object, shape: object, order: object) -> Array:
    array = Array()
    array.fill(raw, dtype, shape, order)
    return array


def _scalar(dtype: object, raw: object) -> int:
    array = Array()
    array.fill(raw, dtype, (1,), "C")
    assert array.value is not None
    return int(array.value[0])


def _encode(text: object, encoding: object = "latin1") -> bytes:
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise ValueError("only latin-1 bytes are understood")
    return text.encode("latin-1")


# What a pickle may "call": these functions of ours, in place of the ones it names.
_CALLS: Mapping[str, Callable[..., object]] = {
    "numpy.core.multiarray._reconstruct": _reconstruct,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy.core.numeric._frombuffer": _from_buffer,
    "numpy.dtype": lambda code, *_: Dtype(code),
    "_codecs.encode": _encode,
    "collections.OrderedDict": lambda *_: {},
    "collections.defaultdict": lambda *_: {},
}
_NAMES = {*_CALLS, "numpy.ndarray", "builtins.list", "builtins.int"}


def load(file: Hashing) -> Any:
    """The value in a pickle of plain data and integer arrays (as `Array`); any other name in it is an error."""
    return _Machine(file).run()


class _Machine:
    """The pickle stack machine, for the opcodes that describe data."""

    def __init__(self, file: Hashing) -> None:
        self.file = file
        self.stack: list[Any] = []
        self.marks: list[int] = []  # where on the stack the open collections begin
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        while (code := self.file.read(1)) != opcodes.STOP:
            action = _ACTIONS.get(code)
            if action is None:
                raise NessError(f"a pickle uses the instruction {code!r}, which data files do not need; refused")
            action(self)
        return self.stack.pop()

    def number(self, form: str) -> int:
        value: int = struct.unpack(form, self.file.read(struct.calcsize(form)))[0]
        return value

    def text(self, count: int) -> None:
        self.stack.append(self.file.read(count).decode("utf-8", "surrogatepass"))

    def string(self, count: int) -> None:
        """A Python 2 string: text when short, raw bytes when long."""
        self.stack.append(self.file.read(count).decode("latin-1") if count < _LONG else self.file.read_array(count))

    def data(self, count: int) -> None:
        self.stack.append(self.file.read(count) if count < _LONG else self.file.read_array(count))

    def quoted(self) -> None:
        value = ast.literal_eval("b" + self.file.read_line().decode("ascii"))
        if not isinstance(value, bytes):
            raise ValueError("a string is not quoted")
        self.stack.append(value.decode("latin-1"))

    def integer(self) -> None:
        line = self.file.read_line()
        self.stack.append({b"00": False, b"01": True}.get(line) if line in (b"00", b"01") else int(line.rstrip(b"L")))

    def long(self, count: int) -> None:
        self.stack.append(int.from_bytes(self.file.read(count), "little", signed=True))

    def marked(self) -> list[Any]:
        at = self.marks.pop()
        items = self.stack[at:]
        del self.stack[at:]
        return items

    def top(self, kind: type) -> Any:
        if not isinstance(self.stack[-1], kind):
            raise ValueError(f"a {kind.__name__} is missing")
        return self.stack[-1]

    def last(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise ValueError("the stack is empty")
        items = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return items

    def pairs(self, items: list[Any]) -> dict[Any, Any]:
        return dict(zip(items[::2], items[1::2], strict=True))

    def name(self, module: str, name: str) -> None:
        found = Global(module, name)
        if found.path not in _NAMES:
            raise NessError(
                f"a pickle names {module}.{name}, expected nothing but NumPy arrays and plain values; "
                "refused without running any of it"
            )
        self.stack.append(found)

    def reduce(self) -> None:
        function, arguments = self.last(2)
        if not isinstance(function, Global) or function.path not in _CALLS or not isinstance(arguments, tuple):
            raise ValueError("a call is not understood")
        self.stack.append(_CALLS[function.path](*arguments))

    def build(self) -> None:
        (state,) = self.last(1)
        if not isinstance(self.stack[-1], Array | Dtype):
            raise ValueError("a state is not understood")
        self.stack[-1].build(state)

    def stack_global(self) -> None:
        module, name = self.last(2)
        self.name(str(module), str(name))

    def push(self, value: object) -> None:
        self.stack.append(value)

    def keep(self, at: int) -> None:
        self.memo[at] = self.stack[-1]


_ACTIONS: Mapping[bytes, Callable[[_Machine], object]] = {
    opcodes.PROTO: lambda m: m.file.read(1),
    opcodes.FRAME: lambda m: m.file.read(8),
    opcodes.MARK: lambda m: m.marks.append(len(m.stack)),
    opcodes.POP: lambda m: m.stack.pop(),
    opcodes.POP_MARK: lambda m: m.marked(),
    opcodes.DUP: lambda m: m.push(m.stack[-1]),
    opcodes.NONE: lambda m: m.push(None),
    opcodes.NEWTRUE: lambda m: m.push(True),
    opcodes.NEWFALSE: lambda m: m.push(False),
    opcodes.INT: lambda m: m.integer(),
    opcodes.LONG: lambda m: m.integer(),
    opcodes.LONG1: lambda m: m.long(m.number("<B")),
    opcodes.LONG4: lambda m: m.long(m.number("<i")),
    opcodes.BININT: lambda m: m.push(m.number("<i")),
    opcodes.BININT1: lambda m: m.push(m.number("<B")),
    opcodes.BININT2: lambda m: m.push(m.number("<H")),
    opcodes.BINFLOAT: lambda m: m.push(m.number(">d")),
    opcodes.STRING: lambda m: m.quoted(),
    opcodes.BINSTRING: lambda m: m.string(m.number("<i")),
    opcodes.SHORT_BINSTRING: lambda m: m.string(m.number("<B")),
    opcodes.UNICODE: lambda m: m.push(m.file.read_line().decode("raw-unicode-escape")),
    opcodes.BINUNICODE: lambda m: m.text(m.number("<I")),
    opcodes.SHORT_BINUNICODE: lambda m: m.text(m.number("<B")),
    opcodes.BINUNICODE8: lambda m: m.text(m.number("<Q")),
    opcodes.BINBYTES: lambda m: m.data(m.number("<I")),
    opcodes.SHORT_BINBYTES: lambda m: m.data(m.number("<B")),
    opcodes.BINBYTES8: lambda m: m.data(m.number("<Q")),
    opcodes.BYTEARRAY8: lambda m: m.data(m.number("<Q")),
    opcodes.EMPTY_TUPLE: lambda m: m.push(()),
    opcodes.TUPLE: lambda m: m.push(tuple(m.marked())),
    opcodes.TUPLE1: lambda m: m.push(tuple(m.last(1))),
    opcodes.TUPLE2: lambda m: m.push(tuple(m.last(2))),
    opcodes.TUPLE3: lambda m: m.push(tuple(m.last(3))),
    opcodes.EMPTY_LIST: lambda m: m.push([]),
    opcodes.LIST: lambda m: m.push(m.marked()),
    opcodes.APPEND: lambda m: (item := m.last(1), m.top(list).extend(item)),
    opcodes.APPENDS: lambda m: (items := m.marked(), m.top(list).extend(items)),
    opcodes.EMPTY_DICT: lambda m: m.push({}),
    opcodes.DICT: lambda m: m.push(m.pairs(m.marked())),
    opcodes.SETITEM: lambda m: (items := m.last(2), m.top(dict).update(m.pairs(items))),
    opcodes.SETITEMS: lambda m: (items := m.marked(), m.top(dict).update(m.pairs(items))),
    opcodes.PUT: lambda m: m.keep(int(m.file.read_line())),
    opcodes.BINPUT: lambda m: m.keep(m.number("<B")),
    opcodes.LONG_BINPUT: lambda m: m.keep(m.number("<I")),
    opcodes.MEMOIZE: lambda m: m.keep(len(m.memo)),
    opcodes.GET: lambda m: m.push(m.memo[int(m.file.read_line())]),
    opcodes.BINGET: lambda m: m.push(m.memo[m.number("<B")]),
    opcodes.LONG_BINGET: lambda m: m.push(m.memo[m.number("<I")]),
    opcodes.GLOBAL: lambda m: m.name(m.file.read_line().decode(), m.file.read_line().decode()),
    opcodes.STACK_GLOBAL: lambda m: m.stack_global(),
    opcodes.REDUCE: lambda m: m.reduce(),
    opcodes.BUILD: lambda m: m.build(),
}
