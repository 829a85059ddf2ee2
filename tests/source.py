"""What Python source says, read without running it: imports, calls of what was imported, attributes that are read."""

import ast
import importlib
import importlib.util
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

Types = Mapping[str, type]


@dataclass(frozen=True, slots=True)
class Import:
    """`from module import name`, or `import module` where name is None. Sorted and shown as `module:name`."""

    module: str
    name: str | None

    def __str__(self) -> str:
        return self.module if self.name is None else f"{self.module}:{self.name}"

    def resolve(self) -> Any:
        """The module or the object. Raises ImportError or AttributeError where it is not there."""
        if self.name is None:
            return importlib.import_module(self.module)
        module = importlib.import_module(self.module)
        if hasattr(module, self.name):
            return getattr(module, self.name)
        return importlib.import_module(f"{self.module}.{self.name}")


@dataclass(frozen=True, slots=True)
class Call:
    """A call of something imported: `import.path(positional..., keywords...)`."""

    of: Import
    path: tuple[str, ...]
    positional: int
    keywords: frozenset[str]
    is_complete: bool
    """Without `*` and `**`, behind which there may be more."""
    line: int


@dataclass(frozen=True, slots=True)
class Use:
    """An attribute of an object of a known type, read or written."""

    owner: type
    attribute: str
    line: int


def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), file.name)


def imports(tree: ast.Module, packages: tuple[str, ...]) -> Iterator[tuple[str, Import]]:
    """What each is bound to, wherever in the file; and what strings name, `a.b` or `a.b._private`, bound to nothing."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and _within(node.module, packages):
            yield from ((alias.asname or alias.name, Import(node.module, alias.name)) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (
                (alias.asname or alias.name, Import(alias.name, None))
                for alias in node.names
                if _within(alias.name, packages)
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_dotted_name(node.value, packages):
            module, _, last = node.value.rpartition(".")
            yield "", Import(module, last) if last.startswith("_") else Import(node.value, None)


def calls(tree: ast.Module, imported: Mapping[str, Import]) -> Iterator[Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (chain := _chain(node.func)) and chain[0] in imported:
            yield _call(node, imported[chain[0]], chain[1:])


def chains(tree: ast.Module, imported: Mapping[str, Import]) -> Iterator[tuple[Import, tuple[str, ...]]]:
    """`name.a.b` for each imported name, read or written, as (import, (a, b)); what follows a call isn't known."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (chain := _chain(node)) and chain[0] in imported:
            yield imported[chain[0]], chain[1:]


def method_calls(tree: ast.AST, receiver: str) -> Iterator[tuple[str, Call]]:
    """Calls `receiver.method(...)` and `....receiver.method(...)`, by method."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if _last_name(node.func.value) == receiver:
            yield node.func.attr, _call(node, Import(receiver, None), (node.func.attr,))


def parameters(module: str, qualname: str) -> tuple[str, ...]:
    """Of a function as it is written, whatever stands in its place in this process or keeps it from being imported.

    Raises LookupError where there is no such function.
    """
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise LookupError(f"there is no module {module}")
    node: ast.AST = parse(Path(spec.origin))
    for name in qualname.split("."):
        node = _defined(node, name)
    assert isinstance(node, ast.FunctionDef)
    given = node.args
    every = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
    return tuple(argument.arg for argument in every if argument is not None)


def reads_of(tree: ast.AST, receiver: str) -> set[str]:
    """Attributes `receiver.x`, and `getattr(receiver, "x", ...)`, written ones left out."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and _last_name(node.value) == receiver:
            found.add(node.attr)
        elif isinstance(node, ast.Call) and _last_name(node.func) == "getattr" and _last_name(node.args[0]) == receiver:
            found.add(ast.literal_eval(node.args[1]))
    return found


def typed_uses(tree: ast.Module, types: Types, classes: Types) -> Iterator[Use]:
    """Attributes of whatever bears one of the names `types`, or was assigned from it in the same function.

    `classes` are the module's own, by name: what `self` is in their methods.
    """
    yield from _typed_uses(tree, dict(types), classes)


def _typed_uses(node: ast.AST, types: dict[str, type], classes: Types) -> Iterator[Use]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            own = {"self": classes[child.name]} if child.name in classes else {}
            yield from _typed_uses(child, types | own, classes)
        elif isinstance(child, ast.FunctionDef):
            yield from _typed_uses(child, dict(types), classes)
        else:
            if isinstance(child, ast.Assign):
                _learn(child.targets[0], child.value, types)
            elif isinstance(child, ast.NamedExpr):
                _learn(child.target, child.value, types)
            if isinstance(child, ast.Attribute):
                owner = types.get(_last_name(child.value) or "")
                if owner is not None:
                    yield Use(owner, child.attr, child.lineno)
            yield from _typed_uses(child, types, classes)


def _learn(target: ast.expr, value: ast.expr, types: dict[str, type]) -> None:
    """`a = x.cache_config`, `a, b = x.cache_config, y`: from here on `a` is what `cache_config` is."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        pairs = list(zip(target.elts, value.elts, strict=True))
    else:
        pairs = [(target, value)]
    for name, source in pairs:
        if isinstance(name, ast.Name):
            known = types.get(_last_name(source) or "")
            types.pop(name.id, None)
            if known is not None:
                types[name.id] = known


@cache
def attributes_of(owner: type) -> frozenset[str]:
    """What an instance may have: of its classes, annotated in them, or set on `self` in any of their methods."""
    found = set(dir(owner))
    for cls in owner.__mro__:
        found |= set(inspect.get_annotations(cls))
        if cls.__module__ != "builtins":
            found |= _set_on_self(cls)
    return frozenset(found)


def _set_on_self(cls: type) -> set[str]:
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):  # it has no source: made by C, or by a decorator
        return set()
    return {
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _last_name(node.value) == "self"
    }


def methods(tree: ast.Module, cls: str) -> set[str]:
    """Those that the class defines itself."""
    (found,) = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == cls)
    return {node.name for node in found.body if isinstance(node, ast.FunctionDef)}


def _defined(node: ast.AST, name: str) -> ast.AST:
    for child in ast.walk(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef) and child.name == name and child is not node:
            return child
    raise LookupError(f"{name} is not there")


def _call(node: ast.Call, of: Import, path: tuple[str, ...]) -> Call:
    starred = sum(isinstance(argument, ast.Starred) for argument in node.args)
    keywords = [keyword.arg for keyword in node.keywords]
    return Call(
        of=of,
        path=path,
        positional=len(node.args) - starred,
        keywords=frozenset(name for name in keywords if name is not None),
        is_complete=not starred and None not in keywords,
        line=node.lineno,
    )


def _chain(node: ast.expr) -> tuple[str, ...]:
    """`a.b.c` as its names; empty for what doesn't begin with a name."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute) and (before := _chain(node.value)):
        return (*before, node.attr)
    return ()


def _last_name(node: ast.expr) -> str | None:
    """`c` of `a.b.c` and of `f(x).c`, `a` of `a`."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def _within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def _is_dotted_name(text: str, packages: tuple[str, ...]) -> bool:
    return re.fullmatch(r"\w+(\.\w+)+", text) is not None and _within(text, packages)
