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
    def nodes(self):
        """All nodes of the tree, for the rules that look at each."""
        return tuple(ast.walk(self.tree))

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
        for node, late, types in _walk(source.tree)
        for target in _targets(node, source, modules)
    ]


def _walk(tree):
    """Yield every statement and expression, with whether it is in a function and under `if
    TYPE_CHECKING`.
    """
    left = [(tree, False, False)]
    while left:
        node, late, types = left.pop()
        if isinstance(node, (ast.expr, ast.stmt)):
            # a union, made anew for each of a million nodes, takes longer
            yield node, late, types
        late = late or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        types = types or (
            isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        )
        if not isinstance(node, (ast.Name, ast.Constant)):  # half of all, with nothing below
            left += [(child, late, types) for child in ast.iter_child_nodes(node)][::-1]


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
