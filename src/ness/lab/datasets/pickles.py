"""A pickle read without running anything: its opcodes are looked through before anything is built.

Known are numbers, text, bytes, lists, tuples, dictionaries with keys of text, bytes and whole numbers, and integer
arrays of NumPy. What a pickle "calls" are functions of ours under the names that NumPy's pickles give.
"""

import io
import pickle
import pickletools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ness.errors import NessError, printable
from ness.lab.datasets.reading import Hashing

DEPTH = 32  # values inside values
_LONG = 1 << 16  # Python 2's strings from here on are bytes
_DIGITS = 32  # of a whole number that is written out
_SLACK = 1024  # how far a memo's index may be ahead of its length: indices are counted up by whoever writes a pickle

_KEYS = {"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "STRING", "BINSTRING", "SHORT_BINSTRING"}
_KEYS |= {"UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"}
_ATOMS = {"NONE", "NEWTRUE", "NEWFALSE", "FLOAT", "BINFLOAT", "BYTEARRAY8"}
_EMPTY = {"EMPTY_TUPLE": "tuple", "EMPTY_LIST": "list", "EMPTY_DICT": "dict"}
_PYTHON_2 = {"STRING", "BINSTRING", "SHORT_BINSTRING"}


class Dtype:
    """An integer dtype that is being put together."""

    def __init__(self, code: object) -> None:
        text = code.decode("latin-1") if isinstance(code, bytes) else code
        kinds = ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "b1")
        if not isinstance(text, str) or text.lstrip("<>|=") not in kinds:
            raise NessError(f"a pickle holds an array of type {code!r:.40}, expected integers; refused")
        self.value = np.dtype(text)

    def __setstate__(self, state: object) -> None:
        """Take the byte order from (version, order, …)."""
        order: Any = state[1] if isinstance(state, tuple) and len(state) >= 2 else None
        order = order.decode("latin-1") if isinstance(order, bytes) else order
        if order not in ("<", ">", "|", "="):
            raise ValueError("a dtype's state is not understood")
        self.value = self.value.newbyteorder(order)


class Array:
    """An array that is being put together; `value` is set when its bytes arrive, and lies over them."""

    value: NDArray[Any] | None = None

    def __setstate__(self, state: object) -> None:
        """Take shape, dtype, order and bytes from (version, shape, dtype, fortran, raw)."""
        if not isinstance(state, tuple) or len(state) != 5:
            raise ValueError("an array's state is not understood")
        _, shape, dtype, fortran, raw = state
        self.fill(raw, dtype, shape, "F" if fortran is True else "C")

    def fill(self, raw: object, dtype: object, shape: object, order: object) -> None:
        """The array over `raw` itself, without a copy."""
        if not isinstance(dtype, Dtype) or order not in ("C", "F", b"C", b"F"):
            raise ValueError("an array's dtype or order is not understood")
        if not isinstance(shape, tuple) or not all(type(n) is int and 0 <= n < 1 << 40 for n in shape):
            raise ValueError("an array's shape is not understood")
        raw = raw.encode("latin-1") if isinstance(raw, str) else raw
        if not isinstance(raw, bytes | bytearray):
            raise ValueError("an array's bytes are missing")
        flat = np.frombuffer(raw, np.uint8).view(dtype.value)
        self.value = flat.reshape(shape, order="F" if order in ("F", b"F") else "C")


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


_ENCODE = "_codecs.encode"
# What a pickle may "call": these functions of ours, in place of the ones it names.
_CALLS: Mapping[str, Callable[..., object]] = {
    "numpy.core.multiarray._reconstruct": _reconstruct,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy.core.numeric._frombuffer": _from_buffer,
    "numpy.dtype": lambda code, *_: Dtype(code),
    _ENCODE: _encode,
    "collections.OrderedDict": lambda *_: {},
    "collections.defaultdict": lambda *_: {},
}
_NAMES = {*_CALLS, "numpy.ndarray", "builtins.list", "builtins.int"}


def load(file: Hashing) -> Any:
    """The value in a pickle of plain data and integer arrays (as `Array`); anything else in it is an error."""
    raw = file.read(file.left)
    python_2 = scan(raw)
    value = _Unpickler(io.BytesIO(raw), encoding="bytes").load()
    return _Settled(python_2).value(value)


def _path(module: str, name: str) -> str:
    """The name of a global, if it is one of those that are known; NumPy 2 moved numpy.core to numpy._core."""
    path = f"{module}.{name}".replace("numpy._core.", "numpy.core.").replace("__builtin__.", "builtins.")
    if path not in _NAMES:
        shown = printable(f"{module}.{name}"[:100])
        raise NessError(
            f"a pickle names {shown}, expected nothing but NumPy arrays and plain values; "
            "refused without running any of it"
        )
    return path


class _Call:
    """A function of ours in the place of one that is named; nothing about it can be changed."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., object]) -> None:
        self.function = function

    def __call__(self, *arguments: object) -> object:
        return self.function(*arguments)

    def __setstate__(self, state: object) -> None:
        raise ValueError("a state is not understood")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        path = _path(str(module), str(name))
        return _Call(_CALLS[path]) if path in _CALLS else object()

    def persistent_load(self, pid: object) -> object:
        raise NessError("a pickle points at something outside itself; refused")


def scan(raw: bytes) -> bool:
    """Look through the opcodes of a pickle, without building anything of it.

    Returns:
        Whether Python 2 wrote it, whose strings have no encoding.

    Raises:
        NessError: it uses what data files do not need: other opcodes, names, keys, or values nested too deep.
        ValueError: it is no pickle.
    """
    shapes, python_2 = _Shapes(len(raw)), False
    with warnings.catch_warnings():  # about escapes in quoted text
        warnings.simplefilter("ignore")
        for opcode, argument, _ in pickletools.genops(raw):
            python_2 = python_2 or opcode.name in _PYTHON_2
            shapes.see(opcode.name, argument)
    return python_2


Shape = tuple[str, int]  # kind of a value on the stack, and how deep values lie in it; kind "mark" opens a collection
_MARK: Shape = ("mark", 0)


class _Shapes:
    """What lies on a pickle's stack, without the values."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.stack: list[Shape] = []
        self.memo: dict[int, Shape] = {}

    def see(self, name: str, argument: Any) -> None:
        """One more opcode."""
        if name in _KEYS:
            self._check_number(argument)
            self.stack.append(("atom" if isinstance(argument, bool) else "key", 1))
        elif name in _ATOMS:
            self.stack.append(("atom", 1))
        elif name in _EMPTY:
            self.stack.append((_EMPTY[name], 1))
        elif (action := _ACTIONS.get(name)) is not None:
            action(self, argument)
        else:
            raise NessError(f"a pickle uses the instruction {name}, which data files do not need; refused")

    def _check_number(self, argument: Any) -> None:
        if isinstance(argument, int) and argument.bit_length() > 4 * _DIGITS:
            raise NessError(f"a pickle holds a whole number of {argument.bit_length()} bits; refused")

    def pop(self, kind: str = "") -> Shape:
        if not self.stack or (self.stack[-1] is _MARK) or (kind and self.stack[-1][0] != kind):
            raise ValueError(f"{kind or 'a value'} is missing on a pickle's stack")
        return self.stack.pop()

    def marked(self) -> list[Shape]:
        items: list[Shape] = []
        while self.stack:
            if (item := self.stack.pop()) is _MARK:
                return items[::-1]
            items.append(item)
        raise ValueError("a mark is missing on a pickle's stack")

    def push(self, kind: str, inside: list[Shape]) -> None:
        depth = 1 + max((depth for _, depth in inside), default=0)
        if depth > DEPTH:
            raise NessError(f"a pickle nests its values deeper than {DEPTH}; refused")
        self.stack.append((kind, depth))

    def extend(self, kind: str, items: list[Shape]) -> None:
        before = self.pop(kind)
        if kind == "dict":
            if len(items) % 2:
                raise ValueError("a dictionary's value is missing")
            for key in items[::2]:
                if key[0] != "key":
                    raise NessError(
                        "a pickle has dictionary keys that are neither text, bytes nor whole numbers; refused"
                    )
        self.push(kind, [*items, (kind, before[1] - 1)])

    def last(self, count: int) -> list[Shape]:
        return [self.pop() for _ in range(count)][::-1]

    def keep(self, at: Any) -> None:
        if not isinstance(at, int) or not 0 <= at <= len(self.memo) + _SLACK:
            raise NessError(f"a pickle remembers a value under the number {at}; refused")
        self.memo[at] = self.pop()
        self.stack.append(self.memo[at])

    def remembered(self, at: Any) -> None:
        if at not in self.memo:
            raise ValueError("a pickle asks for a value that it did not remember")
        self.stack.append(self.memo[at])

    def named(self, argument: Any) -> None:
        module, _, name = str(argument).partition(" ")
        self.stack.append((f"global {_path(module, name)}", 1))

    def stack_global(self) -> None:
        self.pop("key")
        self.pop("key")
        self.stack.append(("global", 1))  # its name is checked before it is looked up

    def reduce(self) -> None:
        arguments, function = self.pop("tuple"), self.pop()
        if not function[0].startswith("global"):
            raise ValueError("a call is not understood")
        bytes_alone = function[0] == f"global {_ENCODE}"
        self.push("key" if bytes_alone else "dict" if "collections" in function[0] else "made", [arguments])

    def build(self) -> None:
        state, built = self.pop(), self.pop("made")
        self.push("made", [state, (built[0], built[1] - 1)])

    def frame(self, size: Any) -> None:
        if not 0 <= size <= self.size:
            raise ValueError("a frame is longer than its pickle")


def _set_items(shapes: _Shapes, _: Any) -> None:
    items = shapes.marked()
    if shapes.stack and shapes.stack[-1][0] == "made":  # an OrderedDict under a name from the stack
        shapes.stack[-1] = ("dict", shapes.stack[-1][1])
    shapes.extend("dict", items)


def _set_item(shapes: _Shapes, _: Any) -> None:
    items = shapes.last(2)
    if shapes.stack and shapes.stack[-1][0] == "made":
        shapes.stack[-1] = ("dict", shapes.stack[-1][1])
    shapes.extend("dict", items)


def _new_dict(shapes: _Shapes, _: Any) -> None:
    items = shapes.marked()
    shapes.stack.append(("dict", 1))
    shapes.extend("dict", items)


_ACTIONS: Mapping[str, Callable[[_Shapes, Any], object]] = {
    "PROTO": lambda s, _: None,
    "FRAME": lambda s, size: s.frame(size),
    "MARK": lambda s, _: s.stack.append(_MARK),
    "POP": lambda s, _: s.stack.pop(),
    "POP_MARK": lambda s, _: s.marked(),
    "DUP": lambda s, _: s.stack.extend([s.pop()] * 2),
    "TUPLE": lambda s, _: s.push("tuple", s.marked()),
    "TUPLE1": lambda s, _: s.push("tuple", s.last(1)),
    "TUPLE2": lambda s, _: s.push("tuple", s.last(2)),
    "TUPLE3": lambda s, _: s.push("tuple", s.last(3)),
    "LIST": lambda s, _: s.push("list", s.marked()),
    "APPEND": lambda s, _: s.extend("list", s.last(1)),
    "APPENDS": lambda s, _: s.extend("list", s.marked()),
    "DICT": _new_dict,
    "SETITEM": _set_item,
    "SETITEMS": _set_items,
    "PUT": lambda s, at: s.keep(at),
    "BINPUT": lambda s, at: s.keep(at),
    "LONG_BINPUT": lambda s, at: s.keep(at),
    "MEMOIZE": lambda s, _: s.keep(len(s.memo)),
    "GET": lambda s, at: s.remembered(at),
    "BINGET": lambda s, at: s.remembered(at),
    "LONG_BINGET": lambda s, at: s.remembered(at),
    "GLOBAL": lambda s, argument: s.named(argument),
    "STACK_GLOBAL": lambda s, _: s.stack_global(),
    "REDUCE": lambda s, _: s.reduce(),
    "BUILD": lambda s, _: s.build(),
    "STOP": lambda s, _: s.pop(),
}


class _Settled:
    """A value with Python 2's short strings as text; one that holds itself or is nested too deep is refused."""

    def __init__(self, python_2: bool) -> None:
        self.python_2 = python_2
        self.inside: set[int] = set()  # containers that are being looked through
        self.done: set[int] = set()  # and those that were

    def value(self, value: Any, depth: int = 1) -> Any:
        if isinstance(value, bytes):
            return value.decode("latin-1") if self.python_2 and len(value) < _LONG else value
        if not isinstance(value, dict | list | tuple):
            return value
        if depth > DEPTH or id(value) in self.inside:
            raise NessError(f"a pickle nests its values deeper than {DEPTH}; refused")
        if id(value) in self.done:
            return value
        self.inside.add(id(value))
        if isinstance(value, dict):
            items = [(self.value(key), self.value(item, depth + 1)) for key, item in value.items()]
            value.clear()
            value.update(items)
        elif isinstance(value, list):
            value[:] = [self.value(item, depth + 1) for item in value]
        else:
            for item in value:
                self.value(item, depth + 1)
        self.inside.discard(id(value))
        self.done.add(id(value))
        return value
