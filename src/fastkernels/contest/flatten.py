"""Parts of this package as one text that stands alone: some names and all that they need.

Statements are copied as they stand, with the comments above them; what nothing needs is left out.
Names stay as they are, so two modules that bind one name differently cannot go into one text.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fastkernels.core.kernels import PACKAGE

_OWN = __name__.partition(".")[0]


class FlattenError(Exception):
    """Something that cannot stand in one text; says which module and name."""


@dataclass(frozen=True)
class _Piece:
    """A top-level statement: the names it needs, and its lines. `is_block`: a def or a class."""

    position: int
    needs: frozenset[str]
    text: str
    is_block: bool


@dataclass(frozen=True)
class _Module:
    """A module's statements by the names they bind, and where it has other names from."""

    name: str
    path: str  # below the package
    is_deferred: bool  # annotations are not evaluated
    pieces: Mapping[str, _Piece]
    own: Mapping[str, tuple[str, str]]  # from this package: module, name
    others: Mapping[str, str]  # from elsewhere: the statement
    rebound: frozenset[str]  # bound by several statements


def flatten(roots: Mapping[str, Collection[str]], without: Collection[str] = ()) -> str:
    """The text of names of modules (`{module: names}`) and of all that they need.

    without: methods that are left out of every class, with what they alone need.
    Raises FlattenError.
    """
    text = _Text(frozenset(without))
    for source, names in roots.items():
        for name in names:
            text.take(text.read(source), name)
    return str(text)


def copy_modules(name: str, root: str) -> dict[str, str]:
    """A module and all of this package that it imports, as they are but for the package's name,
    which becomes `root`: texts by path. For code that one namespace cannot hold, as device code
    whose constants are called like the numbers that they are made of."""
    texts: dict[str, str] = {}
    todo = [name]
    while todo:
        module = _read(todo.pop(), frozenset())
        path = f"{root}/{module.path}"
        if path not in texts:
            text = (PACKAGE / module.path).read_text(encoding="utf-8")
            texts[path] = re.sub(rf"^(from|import) {_OWN}\b", rf"\1 {root}", text, flags=re.M)
            for source, theirs in module.own.values():
                is_module = _is_module(f"{source}.{theirs}")
                todo.append(f"{source}.{theirs}" if is_module else source)
    return texts


class _Text:
    """What has been taken so far, and why no two things may have one name."""

    def __init__(self, without: frozenset[str]) -> None:
        self.without = without
        self.pieces: dict[str, dict[str, _Piece]] = {}  # by module and name
        self.uses: dict[str, dict[str, None]] = {}  # modules that a module takes names from
        self.imports: dict[str, None] = {}  # statements
        self.origin: dict[str, str] = {}

    def read(self, name: str) -> _Module:
        return _read(name, self.without)

    def take(self, module: _Module, name: str) -> None:
        if name in module.own:
            source, theirs = module.own[name]
            if theirs != name:
                raise FlattenError(f"{module.name}: {source}.{theirs} is called {name!r} there")
            self.uses.setdefault(module.name, {})[source] = None
            self.take(self.read(source), name)
        elif name in module.others:
            # `import a` and `import a.b` bind the same `a`.
            self.is_new(name, re.sub(r"^(import \w+)(\.\w+)+$", r"\1", module.others[name]))
            self.imports[module.others[name]] = None
        elif name not in module.pieces:
            if _is_module(f"{module.name}.{name}"):
                raise FlattenError(f"{module.name}.{name} is a module, expected names out of it")
            raise FlattenError(f"{module.name}: nothing there is called {name!r}")
        elif name in module.rebound:
            raise FlattenError(f"{module.name}: several statements bind {name!r}")
        elif self.is_new(name, module.name):
            piece = module.pieces[name]
            self.pieces.setdefault(module.name, {})[name] = piece
            for needed in sorted(piece.needs):
                if needed in module.own or needed in module.others or needed in module.pieces:
                    self.take(module, needed)

    def is_new(self, name: str, source: str) -> bool:
        is_new = name not in self.origin
        if self.origin.setdefault(name, source) != source:
            raise FlattenError(f"{name!r} is of {self.origin[name]!r} and of {source!r}")
        return is_new

    def order(self) -> list[str]:
        """The modules, each after those that it takes names from."""
        placed: dict[str, None] = {}

        def place(name: str) -> None:
            for source in self.uses.get(name, {}):
                if source not in placed:
                    place(source)
            placed[name] = None

        for name in self.pieces:
            place(name)
        return [name for name in placed if name in self.pieces]

    def __str__(self) -> str:
        modules = [self.read(name) for name in self.order()]
        is_deferred = all(module.is_deferred for module in modules)
        head = ["from __future__ import annotations"] if is_deferred else []
        parts = ["\n\n".join([*head, *_import_block(self.imports)])]
        parts += [_section(module, self.pieces[module.name]) for module in modules]
        return "\n\n\n".join(part for part in parts if part) + "\n"


def _section(module: _Module, pieces: Mapping[str, _Piece]) -> str:
    text = f"# ---- {module.path}"
    gap = "\n\n"
    for piece in sorted(set(pieces.values()), key=lambda piece: piece.position):
        text += (gap if not piece.is_block or gap == "\n\n" else "\n\n\n") + piece.text
        gap = "\n\n\n" if piece.is_block else "\n"
    return text


def _import_block(imports: Collection[str]) -> Iterator[str]:
    """The statements, the standard library's first; names from one module share a line."""
    from_module: dict[str, list[str]] = {}
    plain: list[str] = []
    for statement in sorted(imports):
        if statement.startswith("from "):
            source, _, name = statement.removeprefix("from ").partition(" import ")
            from_module.setdefault(source, []).append(name)
        else:
            plain.append(statement)
    lines = plain + [f"from {s} import {', '.join(names)}" for s, names in from_module.items()]
    is_standard = {
        line: line.split()[1].partition(".")[0] in sys.stdlib_module_names for line in lines
    }
    for group in (True, False):
        chosen = [line for line in lines if is_standard[line] is group]
        if chosen:
            yield "\n".join(chosen)


# ---- one module ---------------------------------------------------------------------------------


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is no package
        return False


@cache
def _read(name: str, without: frozenset[str]) -> _Module:
    found = importlib.util.find_spec(name)
    if found is None or not found.origin:
        raise FlattenError(f"{name}: no such module")
    path = Path(found.origin)
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    body = ast.parse(text).body
    pieces: dict[str, _Piece] = {}
    own: dict[str, tuple[str, str]] = {}
    others: dict[str, str] = {}
    rebound: set[str] = set()
    is_deferred = False
    for position, node in enumerate(body):
        if isinstance(node, ast.Import):
            for alias in node.names:
                _import(own, others, alias)
        elif isinstance(node, ast.ImportFrom):
            if node.module is None or node.level:
                raise FlattenError(f"{name}:{node.lineno}: a relative import")
            for alias in node.names:
                bound = alias.asname or alias.name
                if node.module == "__future__":
                    is_deferred = is_deferred or alias.name == "annotations"
                elif node.module.partition(".")[0] == _OWN:
                    own[bound] = (node.module, alias.name)
                else:
                    spelled = alias.name if bound == alias.name else f"{alias.name} as {bound}"
                    others[bound] = f"from {node.module} import {spelled}"
        else:
            following = body[position + 1] if position + 1 < len(body) else None
            piece = _piece(name, node, following, lines, position, without)
            for bound in set(_bound(node)):
                if bound in pieces:
                    rebound.add(bound)
                pieces[bound] = piece
    where = path.relative_to(PACKAGE).as_posix()
    return _Module(name, where, is_deferred, pieces, own, others, frozenset(rebound))


def _import(own: dict[str, tuple[str, str]], others: dict[str, str], alias: ast.alias) -> None:
    bound = alias.asname or alias.name.partition(".")[0]
    if alias.name.partition(".")[0] == _OWN:
        own[bound] = (alias.name, "")
    else:
        others[bound] = f"import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")


def _bound(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
        return
    for each in ast.walk(node):
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            yield each.id


def _piece(
    module: str,
    node: ast.stmt,
    following: ast.stmt | None,
    lines: list[str],
    position: int,
    without: frozenset[str],
) -> _Piece:
    dropped = [
        part
        for part in (node.body if isinstance(node, ast.ClassDef) else [])
        if isinstance(part, ast.FunctionDef) and part.name in without
    ]
    for each in ast.walk(node):
        if isinstance(each, (ast.Import, ast.ImportFrom)):
            source = each.module if isinstance(each, ast.ImportFrom) else each.names[0].name
            if (source or "").partition(".")[0] == _OWN:
                raise FlattenError(f"{module}:{each.lineno}: imports {source} inside a statement")
    needs = frozenset(_free(node, frozenset(), frozenset(map(id, dropped))))
    first, last = _first_line(node), node.end_lineno
    assert last is not None
    while first > 1 and _is_comment(lines[first - 2]):
        first -= 1
    is_block = isinstance(node, (ast.FunctionDef, ast.ClassDef))
    if not is_block and isinstance(following, ast.Expr) and _is_text(following):  # its docstring
        last = following.end_lineno or last
    gone = {
        number
        for drop in dropped
        for number in range(_first_line(drop), (drop.end_lineno or 0) + 1)
    }
    kept = [lines[number - 1] for number in range(first, last + 1) if number not in gone]
    while kept and not kept[-1].strip():
        kept.pop()
    return _Piece(position, needs, "\n".join(kept), is_block)


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def _free(node: ast.AST, bound: frozenset[str], dropped: frozenset[int]) -> Iterator[str]:
    """Names in a statement that its own functions and comprehensions do not bind."""
    if id(node) in dropped:
        return
    if isinstance(node, ast.Name):
        if node.id not in bound:
            yield node.id
        return
    inside = bound
    if isinstance(node, _FUNCTIONS):
        inside = bound | {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}
        body = node.body if isinstance(node.body, list) else [node.body]
        inside |= {name for part in body for name in _binds(part)}
    elif isinstance(node, _COMPREHENSIONS):
        inside = bound | {name for part in node.generators for name in _binds(part.target)}
    for field, value in ast.iter_fields(node):
        # Decorators, defaults and annotations stand outside of a function.
        names = inside if field in ("body", "elt", "key", "value", "generators") else bound
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, ast.AST):
                yield from _free(each, names, dropped)


def _binds(node: ast.AST) -> Iterator[str]:
    """Names that a part of a function's body binds in the function."""
    if isinstance(node, _COMPREHENSIONS):  # a scope of its own
        return
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield node.name
        return
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.ExceptHandler) and node.name:
        yield node.name
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
    for child in ast.iter_child_nodes(node):
        yield from _binds(child)


def _first_line(node: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def _is_comment(line: str) -> bool:
    return line.startswith("#") and not line.startswith("# ----")


def _is_text(node: ast.Expr) -> bool:
    return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
