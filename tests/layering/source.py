"""One source file as the rules see it: its name, its tree, and everything that it imports."""

import ast
from dataclasses import dataclass
from functools import cached_property

PACKAGE = "nnmpi"


@dataclass(frozen=True)
class Import:
    """One module that a file imports.

    Attributes:
        target: its full name; of `from a.b import c` it is a.b.c when that is a module of the tree,
            and else a.b.
        line: where.
        is_late: whether it stands in a function.
        is_for_types: whether it stands under `if TYPE_CHECKING`.
    """

    target: str
    line: int
    is_late: bool
    is_for_types: bool


@dataclass(frozen=True)
class Source:
    """One file.

    Attributes:
        path: relative to the root of the tree, with slashes.
        module: its full name, without `__init__`.
        is_init: whether it is a package's `__init__`.
        text: what stands in it.
        tree: the same, parsed.
    """

    path: str
    module: str
    is_init: bool
    text: str
    tree: ast.Module

    @cached_property
    def walked(self):
        """Each node of the tree with whether it is in a function and under `if TYPE_CHECKING`."""
        return tuple(_walk(self.tree))

    @cached_property
    def nodes(self):
        """All nodes of the tree, for the rules that look at each; see `walk` for what is none."""
        return tuple(node for node, _, _ in self.walked)

    @cached_property
    def strings(self):
        """The literal strings, and the literal parts of f-strings, that are no docstrings."""
        docstrings = {id(node.value) for node in self.nodes if type(node) is ast.Expr}
        return [
            node
            for node in self.nodes
            if type(node) is ast.Constant and type(node.value) is str and id(node) not in docstrings
        ]

    @property
    def part(self):
        """The first name below the package: `comm` of nnmpi.comm.ring; nothing for
        `nnmpi/__init__`.
        """
        return part_of(self.module)


def part_of(module):
    """Return the first name below the package, or nothing for the package itself."""
    return module.removeprefix(PACKAGE).removeprefix(".").partition(".")[0]


def read_tree(root):
    """Return the package's files under `root`, in order."""
    return [_read(root, path) for path in sorted((root / PACKAGE).rglob("*.py"))]


def _read(root, path):
    relative = path.relative_to(root)
    names = relative.with_suffix("").parts
    is_init = names[-1] == "__init__"
    text = path.read_text()
    module = ".".join(names[:-1] if is_init else names)
    return Source(relative.as_posix(), module, is_init, text, ast.parse(text, str(relative)))


def imports(source, modules):
    """Return everything that the file imports, `importlib.import_module("name")` included.

    Args:
        source: the file.
        modules: the full names of all modules and packages of the tree.
    """
    return [
        Import(target, node.lineno, late, types)
        for node, late, types in source.walked
        if type(node) in _IMPORTING
        for target in _targets(node, source, modules)
    ]


_IMPORTING = {ast.Import, ast.ImportFrom, ast.Call}
_FUNCTIONS = {ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda}
# fields in which no statement or expression stands; half of all nodes are in them
_PLAIN = {"ctx", "op", "ops", "names", "name", "id", "attr", "arg", "level", "module", "kind"}
_PLAIN |= {"type_comment", "conversion", "simple", "is_async", "type_ignores", "kwd_attrs", "rest"}


def walk(node):
    """Return the nodes of a tree, without operators, contexts and names of imports.

    `ast.walk` takes six times as long.
    """
    return [inner for inner, _, _ in _walk(node)]


def _walk(tree):
    """Yield every node, with whether it is in a function and under `if TYPE_CHECKING`."""
    left = [(tree, False, False)]
    while left:
        item = node, late, types = left.pop()
        yield item
        kind = type(node)
        if kind is ast.Name or kind is ast.Constant:  # half of all, with nothing below
            continue
        late = late or kind in _FUNCTIONS
        types = types or (kind is ast.If and ast.unparse(node.test).endswith("TYPE_CHECKING"))
        for field in kind._fields:
            if field in _PLAIN:
                continue
            value = getattr(node, field, None)
            if type(value) is list:
                left += [(child, late, types) for child in value if child is not None]
            elif isinstance(value, ast.AST):
                left.append((value, late, types))


def _targets(node, source, modules):
    """Return the full names of the modules that this node imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = _base(node, source)
        full = [f"{base}.{alias.name}" for alias in node.names]
        return list(dict.fromkeys(name if name in modules else base for name in full))
    called = getattr(node, "func", None)
    if getattr(called, "attr", getattr(called, "id", "")) in ("import_module", "__import__"):
        return [
            arg.value
            for arg in node.args[:1]
            if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
        ]
    return []


def _base(node, source):
    """Return the module that `from ... import` names, with the dots of a relative import
    resolved.
    """
    if node.level == 0:
        return node.module or ""
    names = source.module.split(".")
    saved = names[: len(names) - node.level + source.is_init]
    return ".".join([*saved, *([node.module] if node.module else [])])
