"""No key that nothing reads: the code is walked for reads of every field of every settings model.

The walk follows annotations: a parameter, attribute, property or return value that is annotated
with a class of ours is of that class, and so is what is assigned from it. So a key is not taken for
read because some other record has a field of its name.
"""

from __future__ import annotations

import ast
import typing
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from pydantic.fields import FieldInfo

from components.settings import CONFIGS_DIR, Recipe, ServicesSettings, Settings

CODE = ("components", "tasks", "flows")
SETTINGS = CONFIGS_DIR.parent / "components" / "settings"

READ_OTHERWISE = {
    "TrainingSettings.preset": "loading.py reads it of the YAML, before there is a model",
    **{
        f"SliceSettings.{key}": "SliceSettings.source dumps it into a SourceSettings"
        for key in ("kind", "path", "repo_id", "preset", "subset", "revision", "split", "column")
    },
}
"""Keys that no expression reads as an attribute of their model, and what does."""

Types = frozenset[str]
"""Names of classes a value may be of, or hold (a list of sources counts as a source)."""

NONE: Types = frozenset()


def models() -> dict[str, type[Settings]]:
    """All settings models by name: those of the two files, and those within them."""
    found: dict[str, type[Settings]] = {}
    waiting: list[type[Settings]] = [Recipe, ServicesSettings]
    while waiting:
        one = waiting.pop()
        found[one.__name__] = one
        within = [inner for field in one.model_fields.values() for inner in models_in(field)]
        waiting += [inner for inner in within if inner.__name__ not in found]
    return found


def models_in(field: FieldInfo) -> Iterator[type[Settings]]:
    """Settings models that the type of a field names."""
    waiting: list[object] = [field.annotation]
    while waiting:
        one = waiting.pop()
        waiting += typing.get_args(one)
        if isinstance(one, type) and issubclass(one, Settings):
            yield one


KEYS = sorted(f"{name}.{key}" for name, model in models().items() for key in model.model_fields)


class Code:
    """The classes and functions of the code, and the reads of attributes in it.

    Args:
        trees: modules, parsed.
    """

    def __init__(self, trees: list[ast.Module]) -> None:
        nodes = [node for tree in trees for node in ast.walk(tree)]
        self.classes = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
        self.members: dict[tuple[str, str], set[str]] = defaultdict(set)
        self.bases: dict[str, set[str]] = defaultdict(set)
        self.returns: dict[str, set[str]] = defaultdict(set)
        self.reads: set[str] = set()
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                self._learn_class(node)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.returns[node.name] |= self.named(node.returns)
        for name, model in models().items():  # their annotations may be aliases
            for key, field in model.model_fields.items():
                self.members[name, key] = {inner.__name__ for inner in models_in(field)}

    def named(self, annotation: ast.expr | None) -> Types:
        """Classes of ours that an annotation names."""
        if annotation is None:
            return NONE
        names = {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}
        return frozenset(names & self.classes)

    def member(self, owners: Types, name: str) -> Types:
        """Classes of an attribute, or of what a method returns."""
        found: set[str] = set()
        waiting = set(owners)
        seen = set()
        while waiting:
            owner = waiting.pop()
            seen.add(owner)
            found |= self.members[owner, name]
            waiting |= self.bases[owner] - seen
        return frozenset(found)

    def read(self, owners: Types, name: str) -> None:
        """Note that an attribute was read, of each owner and of what it inherits from."""
        waiting = set(owners)
        seen = set()
        while waiting:
            owner = waiting.pop()
            seen.add(owner)
            self.reads.add(f"{owner}.{name}")
            waiting |= self.bases[owner] - seen

    def _learn_class(self, node: ast.ClassDef) -> None:
        self.bases[node.name] |= {base.id for base in node.bases if isinstance(base, ast.Name)}
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                self.members[node.name, item.target.id] |= self.named(item.annotation)
            elif isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
                self.members[node.name, item.name] |= self.named(item.returns)


class Walk(ast.NodeVisitor):
    """Follows the values of one module: what each name is of, and which attributes are read."""

    def __init__(self, code: Code) -> None:
        self._code = code
        self._names: dict[str, Types] = {}
        self._class = ""

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer, self._class = self._class, node.name
        self.generic_visit(node)
        self._class = outer

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outer = self._names
        self._names = dict(self._names)
        arguments = node.args
        for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            is_self = one.arg in ("self", "cls")
            self._names[one.arg] = (
                frozenset({self._class}) if is_self else self._code.named(one.annotation)
            )
        self.generic_visit(node)
        self._names = outer

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            self._assign(target, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        self._bind(node.target, self._code.named(node.annotation))

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.generic_visit(node)
        self._assign(node.target, node.value)

    def visit_For(self, node: ast.For) -> None:
        self._bind(node.target, self._of(node.iter))
        self.generic_visit(node)

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            if item.optional_vars is not None:
                self._bind(item.optional_vars, self._of(item.context_expr))
        self.generic_visit(node)

    def _visit_comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
    ) -> None:
        # What the generators bind is read before them in the source, so they are bound first.
        for generator in node.generators:
            self._bind(generator.target, self._of(generator.iter))
        self.generic_visit(node)

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _visit_comprehension

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        if isinstance(node.ctx, ast.Load):
            self._code.read(self._of(node.value), node.attr)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "getattr":
            owner, name = node.args[:2]
            if isinstance(name, ast.Constant):
                self._code.read(self._of(owner), str(name.value))

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, its in zip(target.elts, value.elts, strict=False):
                self._assign(one, its)
        else:
            self._bind(target, self._of(value))

    def _bind(self, target: ast.expr, types: Types) -> None:
        if isinstance(target, ast.Name):
            self._names[target.id] = types
        elif isinstance(target, ast.Tuple):
            for one in target.elts:
                self._bind(one, types)
        elif isinstance(target, ast.Attribute):
            for owner in self._of(target.value):
                self._code.members[owner, target.attr] |= types

    def _of(self, node: ast.expr) -> Types:
        """The classes that an expression may be of."""
        match node:
            case ast.Name(id=name):
                return self._names.get(name, NONE)
            case ast.Attribute(value=value, attr=attr):
                return self._code.member(self._of(value), attr)
            case ast.Call(func=ast.Name(id=name)):
                made = frozenset({name}) if name in self._code.classes else NONE
                passed = self._of(node.args[0]) if name in PASSES_ON and node.args else NONE
                return made | passed | frozenset(self._code.returns[name])
            case ast.Call(func=ast.Attribute(value=value, attr=attr)):
                owners = self._of(value)
                return self._code.member(owners, attr) or (owners if attr in KEEPS else NONE)
            case ast.IfExp(body=body, orelse=orelse):
                return self._of(body) | self._of(orelse)
            case ast.BoolOp(values=values):
                return frozenset().union(*map(self._of, values))
            case ast.Subscript(value=value) | ast.Await(value=value) | ast.Starred(value=value):
                return self._of(value)
            case ast.NamedExpr(value=value) | ast.DictComp(value=value):
                return self._of(value)
            case ast.ListComp(elt=element) | ast.SetComp(elt=element):
                return self._of(element)
            case ast.GeneratorExp(elt=element):
                return self._of(element)
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                return frozenset().union(*map(self._of, elements))
        return NONE


KEEPS = {"model_copy", "items", "values", "get"}
"""Methods whose result is of what they are called on, or of what it holds."""
PASSES_ON = {"sorted", "list", "tuple", "reversed", "enumerate", "iter", "next", "min", "max"}
"""Functions whose result is of what they are given, or of what it holds."""


def sources() -> Iterator[Path]:
    for folder in CODE:
        yield from sorted((CONFIGS_DIR.parent / folder).rglob("*.py"))


@cache
def reads() -> frozenset[str]:
    """`Model.key` of every read outside of components/settings."""
    trees = {path: ast.parse(path.read_text()) for path in sources()}
    code = Code(list(trees.values()))
    outside = [tree for path, tree in trees.items() if SETTINGS not in path.parents]
    for _ in range(2):  # attributes that are assigned in one place may be read in an earlier one
        for tree in outside:
            Walk(code).visit(tree)
    return frozenset(code.reads)


@pytest.mark.parametrize("key", KEYS)
def test_every_key_is_read(key: str) -> None:
    is_read = key in reads() or key in READ_OTHERWISE
    assert is_read, f"nothing reads {key}: remove it"


def test_what_is_read_otherwise_is_a_key_that_the_walk_does_not_find() -> None:
    assert set(READ_OTHERWISE) <= set(KEYS) - reads()


def test_a_key_of_another_record_is_no_read() -> None:
    """`StoreEndpoint.protocol` is read; a key of that name in the stream's section would not be."""
    assert "StoreEndpoint.protocol" in reads()
    assert not {f"{model}.protocol" for model in models()} & reads()


def test_all_sections_are_walked() -> None:
    assert {"Recipe", "SourceSettings", "SliceSettings", "WarmPrefixSettings"} <= models().keys()
    assert len(KEYS) > 200
