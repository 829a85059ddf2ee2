"""Frozen dataclasses to JSON and back, strictly: every key known, every type right, or an error with the path.

The documents are open: facts are saved on one machine and negotiated on another. So nothing is coerced (1.0 is no
int, 1 is no bool), nothing is ignored, and nothing but a `DocumentError` comes out of bytes that aren't ours.
"""

import json
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

from cluster.contract.errors import DocumentError, UnknownKey, join_path

T = TypeVar("T")


def to_plain(value: object) -> Any:
    """Dataclasses as dicts, tuples as lists, paths as strings; the rest, which JSON has too, as it is."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def canonical(plain: object) -> bytes:
    """The one encoding that digests are taken over: sorted keys, no spaces, ASCII, no floats."""
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def to_text(plain: object) -> str:
    """The same document for people: sorted and indented."""
    return json.dumps(plain, sort_keys=True, indent=2, ensure_ascii=True, allow_nan=False) + "\n"


def parse(text: str | bytes) -> dict[str, Any]:
    """A JSON object out of foreign text.

    Raises:
        DocumentError: it isn't JSON, it isn't an object, a key occurs twice, or it nests too deeply.
    """
    try:
        plain = json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise DocumentError("", "nested too deeply", "a document of facts or a contract") from None
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, and integers beyond Python's limit
        raise DocumentError("", f"not JSON ({error})", "a JSON object") from None
    if not isinstance(plain, dict):
        raise DocumentError("", _describe(plain), "a JSON object")
    return plain


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    plain = dict(pairs)
    if len(plain) != len(pairs):
        twice = next(key for key in plain if sum(key == other for other, _ in pairs) > 1)
        raise DocumentError(twice, "given twice", "given once")
    return plain


def from_plain(cls: type[T], plain: object, path: str = "") -> T:
    """Build `cls`, and the dataclasses inside it, from what `to_plain` gave.

    Raises:
        DocumentError: with the path of the first key that is missing, unknown or of another type.
    """
    return cast(T, _decode(cls, plain, path))


def _decode(hint: Any, plain: object, path: str) -> object:
    origin = typing.get_origin(hint)
    if origin is types.UnionType or origin is typing.Union:
        return _decode_optional(hint, plain, path)
    if origin is typing.Literal:
        allowed = typing.get_args(hint)
        if not any(type(plain) is type(choice) and plain == choice for choice in allowed):
            raise DocumentError(path, _describe(plain), "one of " + ", ".join(map(repr, allowed)))
        return plain
    if origin is tuple:
        return _decode_tuple(typing.get_args(hint), plain, path)
    if origin is Mapping:
        return _decode_mapping(typing.get_args(hint)[1], plain, path)
    if is_dataclass(hint):
        return _decode_object(cast(type[Any], hint), plain, path)
    if hint is float and type(plain) is int:
        return float(plain)  # written by a person: 30 for 30.0
    if hint is Path and type(plain) is str:
        return Path(plain)
    if type(plain) is not hint:  # exact: True is an int to isinstance
        raise DocumentError(path, _describe(plain), _NAMES[hint])
    return plain


def _decode_optional(hint: Any, plain: object, path: str) -> object:
    (inner,) = (choice for choice in typing.get_args(hint) if choice is not types.NoneType)
    return None if plain is None else _decode(inner, plain, path)


def _decode_tuple(hints: tuple[Any, ...], plain: object, path: str) -> tuple[object, ...]:
    if not isinstance(plain, list):
        raise DocumentError(path, _describe(plain), "a list")
    if hints[-1] is Ellipsis:
        hints = (hints[0],) * len(plain)
    if len(hints) != len(plain):
        raise DocumentError(path, f"a list of {len(plain)}", f"a list of {len(hints)}")
    return tuple(_decode(hint, item, f"{path}[{i}]") for i, (hint, item) in enumerate(zip(hints, plain, strict=True)))


def _decode_mapping(hint: Any, plain: object, path: str) -> object:
    if not isinstance(plain, dict):
        raise DocumentError(path, _describe(plain), "an object")
    for key in plain:
        if not isinstance(key, str):
            raise DocumentError(join_path(path, str(key)), f"the key {key!r}", "a string")
    return {key: _decode(hint, item, join_path(path, key)) for key, item in plain.items()}


def _decode_object(cls: type[Any], plain: object, path: str) -> object:
    if not isinstance(plain, dict):
        raise DocumentError(path, _describe(plain), "an object")
    known = {field.name: field for field in fields(cls)}
    for key in plain:
        if key not in known:
            raise UnknownKey(join_path(path, str(key)), tuple(known))
    _require(known.values(), plain, path)
    hints = _hints_of(cls)  # type: ignore[arg-type]  # mypy holds its instances' __hash__ for its own
    arguments = {key: _decode(hints[key], item, join_path(path, key)) for key, item in plain.items()}
    try:
        return cls(**arguments)
    except DocumentError as error:  # what the class itself found, seen from here
        raise error.below(path) from None


@cache
def _hints_of(cls: type[Any]) -> dict[str, Any]:
    """Once a class: a batch has a hundred thousand of some."""
    return typing.get_type_hints(cls)


def _require(known: Iterable[Field[Any]], plain: dict[str, Any], path: str) -> None:
    for field in known:
        optional = field.default is not MISSING or field.default_factory is not MISSING
        if field.name not in plain and not optional:
            raise DocumentError(join_path(path, field.name), "missing", "given")


_NAMES = {str: "a string", Path: "a path", int: "an integer", float: "a number", bool: "true or false"}


def _describe(plain: object) -> str:
    if plain is None:
        return "null"
    kinds: dict[type, str] = {dict: "an object", list: "a list"}
    return kinds.get(type(plain)) or repr(plain)[:80]
