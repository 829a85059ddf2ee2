"""See a config's fields being written, and by whom, without touching the instance.

vLLM copies configs by their `__dict__` and rebuilds them with `type(config)(**fields)`, pickles them to its workers and
compares them. So neither the instance nor its class may show that it is watched: the class gets a `__setattr__` that
asks a side table, for as long as one of its instances is in it. A copy isn't in it, and is an ordinary config.

Not seen: `object.__setattr__`, and changes inside a list or dict. `Seal.check` finds those.
"""

import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath
from types import FrameType
from typing import Any

from cluster.contract.errors import Writer

OnWrite = Callable[[str, object, object, Writer], None]
"""(field, old, new, writer), before the write; raising keeps it from happening."""


class _Unset:
    def __repr__(self) -> str:
        return "unset"


UNSET = _Unset()


@dataclass(slots=True)
class _Guard:
    setattr: Callable[[object, str, object], None]
    own: Any
    """The class's own `__setattr__`, where it has one and doesn't inherit it."""
    watched: int = 0
    """Instances of the class that are watched."""


_watched: dict[int, tuple["weakref.ref[object]", OnWrite]] = {}
_guards: dict[type, _Guard] = {}
_lock = threading.RLock()  # reentrant: an instance may die, and be forgotten, while another is taken in


def watch(config: object, on_write: OnWrite) -> Callable[[], None]:
    """Call `on_write` before each write that changes `config`, until what is returned is called, or `config` dies.

    A write of an equal value isn't reported: vLLM assigns what is already there in many places.

    Raises:
        ValueError: it is watched already.
    """
    key, cls = id(config), type(config)

    def stop(_: object = None) -> None:
        with _lock:
            if _watched.get(key) is entry:  # not a later watch of the same instance, nor of one at the same address
                del _watched[key]
                _release(cls)

    entry = (weakref.ref(config, stop), on_write)
    with _lock:
        if key in _watched:
            raise ValueError(f"this {cls.__name__} is watched already")
        _guard(cls)
        _watched[key] = entry
    return stop


def _guard(cls: type) -> None:
    guard = _guards.get(cls)
    if guard is None:
        guard = _Guard(_guarded_setattr(cls), own=cls.__dict__.get("__setattr__"))
        cls.__setattr__ = guard.setattr  # type: ignore[method-assign, assignment]
        _guards[cls] = guard
    guard.watched += 1


def _release(cls: type) -> None:
    guard = _guards[cls]
    guard.watched -= 1
    if guard.watched:
        return
    del _guards[cls]
    if cls.__dict__.get("__setattr__") is not guard.setattr:
        return  # somebody patched over it since: it stays below, idle
    if guard.own is None:
        del cls.__setattr__
    else:
        cls.__setattr__ = guard.own  # type: ignore[method-assign]


def _guarded_setattr(cls: type) -> Callable[[object, str, object], None]:
    original: Any = cls.__setattr__

    def guarded_setattr(self: object, name: str, value: object) -> None:
        # Of a subclass's instance, the subclass's guard has reported already.
        entry = _watched.get(id(self)) if type(self) is cls else None
        if entry is not None:
            old = getattr(self, name, UNSET)
            if not (old is value or old == value):
                entry[1](name, old, value, find_writer(sys._getframe(1)))
        original(self, name, value)

    return guarded_setattr


def find_writer(frame: FrameType) -> Writer:
    """Who is at work in `frame`: its line, and the class of the nearest `self` up the stack in the same package.

    A helper that rewrites a config for a layer (vLLM's `_resolve_dsv4_kv_cache_dtype`) is called by the layer, and
    the layer's class is what tells a reader where the write came from.
    """
    code = frame.f_code
    location = f"{_inside_package(frame)}:{frame.f_lineno}"
    return Writer(class_name=_class_at_work(frame), function=code.co_qualname, location=location)


def _class_at_work(frame: FrameType) -> str:
    package = _module(frame).partition(".")[0]
    caller: FrameType | None = frame
    while caller is not None and _module(caller).partition(".")[0] == package:
        code = caller.f_code
        first = code.co_varnames[0] if code.co_argcount else ""
        if first in ("self", "cls") and first in caller.f_locals:
            owner = caller.f_locals[first]
            return (owner if isinstance(owner, type) else type(owner)).__qualname__
        caller = caller.f_back
    return ""


def _inside_package(frame: FrameType) -> str:
    """`vllm/models/deepseek_v4/attention.py`, wherever vLLM is installed: writes are part of facts and contracts."""
    path = PurePath(frame.f_code.co_filename)
    depth = _module(frame).count(".") + 1 + (path.name == "__init__.py")
    return "/".join(path.parts[-depth:])


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
