"""Reading a pickle without running it.

A pickle is a program for a small stack machine. Python's own machine imports and calls what the
program names; this one does not. A global is kept as text (`Symbol`), a call as a record of itself
(`Foreign`), attributes are never looked up or set on anything but our own records. Tensors come
from `rebuild`, which only does arithmetic on their description. So no input can run code here,
whatever it names; `symbols` then decides what is refused.
"""

from __future__ import annotations

import pickletools
import warnings
from collections.abc import Callable
from typing import Any, Protocol

from .rebuild import REBUILD_FROM_TYPE, TensorRef, Unsupported, rebuild
from .symbols import Foreign, Symbol, made_by, words

_PLAIN_KEYS = (str, int, float, bytes, type(None))
_NO_ARGUMENTS: tuple[Any, ...] = ()


class ByteStream(Protocol):
    """What a pickle is read from."""

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes."""

    def readline(self) -> bytes:
        """Bytes up to and including the next newline."""


class BrokenPickleError(ValueError):
    """The bytes are no valid pickle, or one that no tensor file needs."""


class Table(dict[Any, Any]):
    """A dict or OrderedDict of the pickle.

    Attributes:
        state: What was set on it beside its items.
        cls: The class of another kind of dict.
    """

    state: Any = None
    cls: Symbol | None = None


class Bag(list[Any]):
    """A set of the pickle; its items need not be hashable here."""


class Unpickler:
    """One machine for all pickles of a file; it keeps the list of globals they name.

    Attributes:
        symbols: Every global met, in order, without repeats.
        called: Those that are called.
        made: Classes of which objects are made, without a call.
        tricks: What no honest pickle does, in words.
    """

    def __init__(self, persistent: Callable[[Any], Any]) -> None:
        self.symbols: dict[Symbol, None] = {}
        self.called: dict[Symbol, None] = {}
        self.made: dict[Symbol, None] = {}
        self.tricks: dict[str, None] = {}
        self._persistent = persistent

    def load(self, stream: ByteStream) -> Any:
        """The value of the next pickle in the stream, which is left right behind it.

        Raises:
            BrokenPickleError: See there.
        """
        self._stack: list[Any] = []
        self._outer: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._built: dict[int, Any] = {}
        try:
            with warnings.catch_warnings():
                # Of odd escapes in protocol 0 text.
                warnings.simplefilter("ignore", DeprecationWarning)
                return self._run(stream)
        except BrokenPickleError:
            raise
        except (IndexError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise BrokenPickleError(f"invalid pickle ({error})") from error
        except (OverflowError, MemoryError, RecursionError) as error:
            raise BrokenPickleError("invalid pickle (a size out of range)") from error

    def _run(self, stream: ByteStream) -> Any:
        # typeshed asks for IO[bytes]; genops needs only read and readline.
        for opcode, argument, _ in pickletools.genops(stream):  # type: ignore[arg-type]
            name = opcode.name
            if name in _CONSTANTS:
                self._stack.append(argument)
            elif name == "STOP":
                return self._stack.pop()
            elif name != "PROTO" and name != "FRAME":
                _OPERATIONS[name](self, argument)
        raise BrokenPickleError("invalid pickle (no end)")

    def _pop_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._outer.pop()
        return items

    def _mark(self, _: Any) -> None:
        self._outer.append(self._stack)
        self._stack = []

    def _push_none(self, _: Any) -> None:
        self._stack.append(None)

    def _push_true(self, _: Any) -> None:
        self._stack.append(True)

    def _push_false(self, _: Any) -> None:
        self._stack.append(False)

    def _pop(self, _: Any) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._pop_mark()

    def _pop_to_mark(self, _: Any) -> None:
        self._pop_mark()

    def _dup(self, _: Any) -> None:
        self._stack.append(self._stack[-1])

    def _put(self, index: Any) -> None:
        self._memo[index] = self._stack[-1]

    def _memoize(self, _: Any) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _get(self, index: Any) -> None:
        self._stack.append(self._memo[index])

    def _empty_list(self, _: Any) -> None:
        self._stack.append([])

    def _empty_set(self, _: Any) -> None:
        self._stack.append(Bag())

    def _frozen_set(self, _: Any) -> None:
        items = self._pop_mark()
        self._stack.append(Foreign(Symbol("builtins", "frozenset"), (items,)))

    def _empty_table(self, _: Any) -> None:
        self._stack.append(Table())

    def _empty_tuple(self, _: Any) -> None:
        self._stack.append(())

    def _list(self, _: Any) -> None:
        items = self._pop_mark()
        self._stack.append(items)

    def _tuple(self, _: Any) -> None:
        items = self._pop_mark()
        self._stack.append(tuple(items))

    def _tuple1(self, _: Any) -> None:
        self._stack[-1:] = [(self._stack[-1],)]

    def _tuple2(self, _: Any) -> None:
        self._stack[-2:] = [(self._stack[-2], self._stack[-1])]

    def _tuple3(self, _: Any) -> None:
        self._stack[-3:] = [(self._stack[-3], self._stack[-2], self._stack[-1])]

    def _table(self, _: Any) -> None:
        items = self._pop_mark()
        self._stack.append(Table())
        self._fill(items)

    def _append(self, _: Any) -> None:
        self._extend([self._stack.pop()])

    def _appends(self, _: Any) -> None:
        self._extend(self._pop_mark())

    def _extend(self, items: list[Any]) -> None:
        target = self._stack[-1]
        self._require_untouched(target)
        if isinstance(target, list):
            target.extend(items)
        elif not isinstance(target, Foreign):
            raise BrokenPickleError("invalid pickle (items for something that is no list)")

    def _set_item(self, _: Any) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._fill([key, value])

    def _set_items(self, _: Any) -> None:
        self._fill(self._pop_mark())

    def _fill(self, items: list[Any]) -> None:
        target = self._stack[-1]
        self._require_untouched(target)
        if isinstance(target, Table):
            for key, value in zip(items[::2], items[1::2], strict=True):
                # Other keys are wrapped: hashing a hostile nest of tuples takes forever.
                target[key if isinstance(key, _PLAIN_KEYS) else Foreign(None, (key,))] = value
        elif not isinstance(target, Foreign):
            raise BrokenPickleError("invalid pickle (entries for something that is no dict)")

    def _global(self, argument: Any) -> None:
        module, _, name = argument.partition(" ")
        self._push_symbol(module, name)

    def _stack_global(self, _: Any) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if not (isinstance(module, str) and isinstance(name, str)):
            raise BrokenPickleError("invalid pickle (a global whose name is no text)")
        self._push_symbol(module, name)

    def _push_symbol(self, module: str, name: str) -> None:
        symbol = Symbol(module, name)
        self.symbols[symbol] = None
        self._stack.append(symbol)

    def _reduce(self, _: Any) -> None:
        args, function = self._stack.pop(), self._stack.pop()
        self._call(function, args)

    def _new(self, _: Any) -> None:
        args, cls = self._stack.pop(), self._stack.pop()
        self._call(cls, args, new=True)

    def _new_with_keywords(self, _: Any) -> None:
        keywords, args, cls = self._stack.pop(), self._stack.pop(), self._stack.pop()
        self._call(cls, args if not keywords else (*args, keywords), new=True)

    def _instance(self, argument: Any) -> None:
        args = self._pop_mark()
        self._global(argument)
        self._call(self._stack.pop(), tuple(args))

    def _object(self, _: Any) -> None:
        cls, *args = self._pop_mark()
        self._call(cls, tuple(args))

    def _call(self, function: Any, args: Any, *, new: bool = False) -> None:
        """Record a call, or of a class its `__new__`.

        Only descriptions of tensors and plain dicts are worked out.
        """
        if not isinstance(args, tuple):
            raise BrokenPickleError("invalid pickle (arguments that are no tuple)")
        if isinstance(function, Symbol):
            self._note(function, args, new=new)
        if isinstance(function, Foreign):
            self.tricks["an object of its own making"] = None
            self._stack.append(Foreign(None, args))
        elif not isinstance(function, Symbol):
            raise BrokenPickleError("invalid pickle (a call of something that is no function)")
        elif function in _TABLES:
            table = Table()
            table.cls = function if function.name == "defaultdict" else None
            self._stack.append(table)
            items = args[-1] if args and isinstance(args[-1], list) else _NO_ARGUMENTS
            for key, value in items:
                self._fill([key, value])
        else:
            self._stack.append(rebuild(function, args))

    def _note(self, function: Symbol, args: tuple[Any, ...], *, new: bool) -> None:
        if new:
            self.made[function] = None
            return
        self.called[function] = None
        self.made.update(dict.fromkeys(made_by(function, args)))
        if function == REBUILD_FROM_TYPE and args and isinstance(args[0], Symbol):
            self.called[args[0]] = None

    def _require_untouched(self, target: Any) -> None:
        """An object gets its state last: what is done to it then, its own attributes would do."""
        if id(target) in self._built:
            self.tricks["what it put into an object itself"] = None

    def _build(self, _: Any) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        self._require_untouched(target)
        self._built[id(target)] = target
        if isinstance(target, Foreign):
            target.state = state
        elif isinstance(target, Symbol):
            self.tricks[f"{target}, with other attributes,"] = None
        elif isinstance(target, Table):
            target.state = state
        elif isinstance(target, TensorRef):
            self._stack[-1] = Unsupported("a tensor with a state of its own")
        elif not isinstance(target, Unsupported):
            raise BrokenPickleError("invalid pickle (a state for plain data)")

    def _persistent_id(self, _: Any) -> None:
        self._stack.append(self._persistent(self._stack.pop()))

    def _refuse(self, _: Any) -> None:
        raise BrokenPickleError("a pickle that uses extension codes or outside buffers")


_TABLES = frozenset(
    (
        Symbol("collections", "OrderedDict"),
        Symbol("collections", "defaultdict"),
        Symbol("builtins", "dict"),
        Symbol("__builtin__", "dict"),
    )
)

_CONSTANTS = words(
    """
INT BININT BININT1 BININT2 LONG LONG1 LONG4 STRING BINSTRING SHORT_BINSTRING BINBYTES
SHORT_BINBYTES BINBYTES8 BYTEARRAY8 UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8 FLOAT BINFLOAT
"""
)

_Operation = Callable[[Unpickler, Any], None]
_OPERATIONS: dict[str, _Operation] = {
    "NONE": Unpickler._push_none,
    "NEWTRUE": Unpickler._push_true,
    "NEWFALSE": Unpickler._push_false,
    "MARK": Unpickler._mark,
    "POP": Unpickler._pop,
    "POP_MARK": Unpickler._pop_to_mark,
    "DUP": Unpickler._dup,
    "PUT": Unpickler._put,
    "BINPUT": Unpickler._put,
    "LONG_BINPUT": Unpickler._put,
    "MEMOIZE": Unpickler._memoize,
    "GET": Unpickler._get,
    "BINGET": Unpickler._get,
    "LONG_BINGET": Unpickler._get,
    "EMPTY_LIST": Unpickler._empty_list,
    "EMPTY_SET": Unpickler._empty_set,
    "EMPTY_DICT": Unpickler._empty_table,
    "EMPTY_TUPLE": Unpickler._empty_tuple,
    "LIST": Unpickler._list,
    "DICT": Unpickler._table,
    "TUPLE": Unpickler._tuple,
    "FROZENSET": Unpickler._frozen_set,
    "TUPLE1": Unpickler._tuple1,
    "TUPLE2": Unpickler._tuple2,
    "TUPLE3": Unpickler._tuple3,
    "APPEND": Unpickler._append,
    "APPENDS": Unpickler._appends,
    "ADDITEMS": Unpickler._appends,
    "SETITEM": Unpickler._set_item,
    "SETITEMS": Unpickler._set_items,
    "GLOBAL": Unpickler._global,
    "STACK_GLOBAL": Unpickler._stack_global,
    "REDUCE": Unpickler._reduce,
    "NEWOBJ": Unpickler._new,
    "NEWOBJ_EX": Unpickler._new_with_keywords,
    "INST": Unpickler._instance,
    "OBJ": Unpickler._object,
    "BUILD": Unpickler._build,
    "BINPERSID": Unpickler._persistent_id,
    "PERSID": Unpickler._refuse,
    "EXT1": Unpickler._refuse,
    "EXT2": Unpickler._refuse,
    "EXT4": Unpickler._refuse,
    "NEXT_BUFFER": Unpickler._refuse,
    "READONLY_BUFFER": Unpickler._refuse,
}
