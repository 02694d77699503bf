"""The shape of the package in numbers, a thermometer and no aim: python -m tests.layering.measure [ROOT] [--list].

--list names the public functions of three or more parameters whose docstrings explain none of them, and the class names
that stand in several files.
"""

import ast
import re
import sys
import tokenize
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

from tests.layering.rules import Tree
from tests.layering.source import PACKAGE, Source

SMALL, SMALLER = 60, 80  # lines of files that are hardly rooms of their own


def measure(root: Path) -> dict[str, str]:
    """Return each figure in words, by what it is of."""
    tree = Tree(root)
    code = [source for source in tree.sources if not source.is_init]
    lines = {source.module: source.text.count("\n") for source in tree.sources}
    edges = _edges(tree)
    importers = Counter(target for targets in edges.values() for target in targets)
    single = [source for source in code if importers[source.module] == 1]
    names = Counter(Path(source.path).name for source in code if not source.path.endswith("__main__.py"))
    private, once = _private(code)
    functions = _functions(code)
    widest = sorted(functions, key=lambda found: -len(found[2]))[:3]
    public = [found for found in functions if len(found[2]) >= 3 and not found[1].startswith("_")]
    explained = [found for found in public if found[3]]
    return {
        "lines / files": f"{sum(lines.values()):,} / {len(tree.sources)}",
        "longest chain of imports": str(_longest(edges)),
        "import edges per module": f"{sum(map(len, edges.values())) / len(edges):.1f}",
        f"files under {SMALL} lines": str(sum(lines[source.module] < SMALL for source in tree.sources)),
        f"modules with one importer / of these under {SMALLER} lines": (
            f"{len(single)} / {sum(lines[source.module] < SMALLER for source in single)}"
        ),
        "private functions used once": f"{once} of {private}",
        "comments per 100 lines": f"{100 * sum(map(_comments, code)) / sum(lines.values()):.1f}",
        "class names in several files": str(len(_shared_classes(code))),
        "module file names that repeat": str(sum(count > 1 for count in names.values())),
        "most parameters": ", ".join(f"{name} {len(parameters)}" for _, name, parameters, _ in widest),
        "public functions of 3 or more parameters that explain them": f"{len(explained)} of {len(public)}",
    }


def packages(root: Path) -> list[str]:
    """Return lines and files of each part of the package."""
    found: dict[str, list[int]] = defaultdict(list)
    for source in Tree(root).sources:
        found[source.part or PACKAGE].append(source.text.count("\n"))
    return [f"{name:12s} {sum(sizes):6d} lines in {len(sizes):3d} files" for name, sizes in sorted(found.items())]


def _edges(tree: Tree) -> dict[str, set[str]]:
    """Return what each module imports of the package at import time; a package's `__init__` only hands names on."""
    modules = {source.module for source in tree.sources if not source.is_init}
    return {
        source.module: {
            found.target for found in tree.imports[source.path] if found.target in modules and not found.is_for_types
        }
        - {source.module}
        for source in tree.sources
        if source.module in modules
    }


def _longest(edges: dict[str, set[str]]) -> int:
    @cache
    def depth(module: str) -> int:
        return 1 + max(map(depth, edges[module]), default=0)

    return max(map(depth, edges))


def _comments(source: Source) -> int:
    tokens = tokenize.generate_tokens(iter(source.text.splitlines(keepends=True)).__next__)
    return sum(token.type == tokenize.COMMENT for token in tokens)


def _private(code: list[Source]) -> tuple[int, int]:
    """Return how many functions on modules' top levels are private, and how many of them are used once."""
    total = once = 0
    for source in code:
        used = Counter(
            node.id for node in ast.walk(source.tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        )
        private = [node.name for node in source.tree.body if isinstance(node, ast.FunctionDef) and node.name[0] == "_"]
        total += len(private)
        once += sum(used[name] == 1 for name in private)
    return total, once


def _functions(code: list[Source]) -> list[tuple[str, str, list[str], bool]]:
    """Return file, name and parameters of every function, and whether its docstring, or its class's, explains them."""
    found = []
    for source in code:
        owners = [source.tree, *(node for node in source.tree.body if isinstance(node, ast.ClassDef))]
        for owner in owners:
            for node in owner.body:
                if isinstance(node, ast.FunctionDef):
                    arguments = node.args
                    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
                    names = [each.arg for each in every if each.arg not in ("self", "cls")]
                    is_init = node.name == "__init__" and isinstance(owner, ast.ClassDef)
                    text = ast.get_docstring(owner if is_init else node) or ""
                    private = isinstance(owner, ast.ClassDef) and owner.name.startswith("_")
                    name = owner.name if is_init else ("_" if private else "") + node.name
                    found.append(
                        (source.path, name, names, "Args:" in text or all(_says(text, each) for each in names))
                    )
    return found


def _says(text: str, word: str) -> bool:
    return re.search(rf"\b{word}\b", text) is not None


def _shared_classes(code: list[Source]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for source in code:
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(source.path)
    return {name: paths for name, paths in sorted(found.items()) if len(paths) > 1}


def main() -> None:
    """Print all of it."""
    words = [word for word in sys.argv[1:] if word != "--list"]
    root = Path(words[0]) if words else Path(__file__).parents[2]
    lines = [f"{name:62s} {value}" for name, value in measure(root).items()]
    lines += ["", *packages(root)]
    if "--list" in sys.argv:
        code = [source for source in Tree(root).sources if not source.is_init]
        lines += ["", "Class names in several files:"]
        lines += [f"  {name}: {', '.join(paths)}" for name, paths in _shared_classes(code).items()]
        lines += ["", "Public functions of three or more parameters without Args:"]
        lines += [
            f"  {path}: {name}({', '.join(parameters)})"
            for path, name, parameters, explained in _functions(code)
            if len(parameters) >= 3 and not name.startswith("_") and not explained
        ]
    print("\n".join(lines))


if __name__ == "__main__":
    main()
