"""Which test files a change touches: `scripts/test --changed`.

A test file is touched if it has changed itself, if it imports a changed module, directly or by
others, or if it names a changed file that is no module. Imports are read from the sources:

    from nnmpi.data import load     the module that defines `load`, and what that one imports
    data.load(...)                  the same, where `data` is the package
    "nnmpi.train", "lab.plan"       a module that a test starts or a table names, by a text

It is a filter for who is at work, not a proof: tests also reach modules by ways that no source
shows.
The whole suite is run before a change is merged.
"""

from __future__ import annotations

import ast
import gc
import re
import subprocess
from functools import cached_property
from pathlib import Path

PACKAGES = "nnmpi", "tests", "benchmarks"
BRANCHES = "origin/main", "main", "origin/master", "master"
TABLE = "nnmpi.commands.table"  # names modules by texts, as tests do
MODULE = re.compile(r"[a-z_]+(?:\.[a-z_]\w*)*")


def changed_since(root, revision=""):
    """Return the files that differ from a commit, and those that git does not know or ignore.

    Args:
        root: the checkout.
        revision: the commit; empty for where this branch left the main one.

    Raises:
        ValueError: for a revision that git does not know, and outside of a checkout.
    """
    since = revision or _branching(root) or "HEAD"
    tracked = _git(root, "diff", "--name-only", "--no-renames", "-z", since, "--")
    untracked = _git(root, "ls-files", "--others", "--exclude-standard", "-z")
    return sorted({*filter(None, (tracked + untracked).split("\0"))})


def _branching(root):
    """Return the commit where this branch left the main one, if there is such a branch."""
    for branch in BRANCHES:
        try:
            return _git(root, "merge-base", "HEAD", branch).strip()
        except ValueError:
            pass
    return ""


def _git(root, *words):
    ending = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
    if ending.returncode:
        raise ValueError(f"git {' '.join(words)}: {ending.stderr.strip() or 'failed'}")
    return ending.stdout


def touched_tests(root, changed):
    """Return the test files that a change touches, the nearest ones first.

    Args:
        root: the checkout.
        changed: paths of changed files, relative to it; also of removed ones.
    """
    collects = gc.isenabled()
    gc.disable()  # it would visit the trees of all files again and again
    try:
        return _Sources(root).touched(changed)
    finally:
        if collects:
            gc.enable()


class _Sources:
    """The modules of a checkout and what they import."""

    def __init__(self, root):
        self.paths = {
            _module_of(path.relative_to(root)): path
            for package in PACKAGES
            for path in (root / package).rglob("*.py")
        }
        self.root = root
        self._trees = {}

    def touched(self, changed):
        """Return the test files that changed files touch; see `touched_tests`."""
        modules = {_module_of(Path(name)) for name in changed if name.endswith(".py")}
        others = [name for name in changed if _module_of(Path(name)) not in self.paths]
        folders = {Path(name).parent.as_posix() for name in changed if name.endswith("conftest.py")}
        tests = {name: path for name, path in self.paths.items() if path.name.startswith("test_")}
        found = []
        for name, path in tests.items():
            relative = path.relative_to(self.root)
            steps = self._steps(name)
            near = [steps[module] for module in modules if module in steps]
            if folders & {folder.as_posix() for folder in relative.parents}:
                near.append(1)
            if any(_names(text, other) for text in self._texts(name) for other in others):
                near.append(1)
            if near:
                found.append((min(near), relative.as_posix()))
        return [path for _, path in sorted(found)]

    def _steps(self, name):
        """Return {module: imports to it} for a module and all that it imports, by others, too."""
        steps, left = {name: 0}, [name]
        for module in left:  # which grows
            for target in self._imports.get(module, ()):
                if target not in steps:
                    steps[target] = steps[module] + 1
                    left.append(target)
        return steps

    @cached_property
    def _imports(self):
        return {name: self._imports_of(name) for name in self.paths}

    @cached_property
    def _exports(self):
        """For each package, {name: the module and the name that it is imported from}."""
        result = {}
        for package, path in self.paths.items():
            if path.name == "__init__.py":
                result[package] = {
                    alias.asname or alias.name: (node.module or "", alias.name)
                    for node in self._nodes(package, ast.ImportFrom)
                    for alias in node.names
                }
        return result

    def _imports_of(self, module):
        """Return the modules that one imports; a package alone imports none of those it offers."""
        bound, found = {}, set()  # names of modules in this one, by the names they have here
        for node in self._nodes(module, ast.Import, ast.ImportFrom):
            for alias in node.names:
                if isinstance(node, ast.Import):
                    target, here = (alias.name, ""), alias.asname or alias.name.partition(".")[0]
                    whole = alias.name if alias.asname else here
                else:
                    target, here = (node.module or "", alias.name), alias.asname or alias.name
                    whole = f"{node.module}.{alias.name}"
                if self.paths[module].name == "__init__.py" and module != "nnmpi":
                    continue
                if module == "nnmpi" and isinstance(node, ast.ImportFrom) and node.col_offset:
                    continue  # of types: it offers them, and imports them when they are asked for
                found.add(self._defining(*target))
                bound[here] = whole
        for node in self._nodes(module, ast.Attribute):
            chain = _chain(node)
            if chain and chain[0] in bound:
                found |= self._along(bound[chain[0]], chain[1:])
        if module.startswith("tests") or module == TABLE:
            found |= {name for text in self._texts(module) for name in self._named(text)}
        return found & self.paths.keys() | {name for name in found if name.startswith(PACKAGES)}

    def _along(self, module, names):
        """Return the modules that attributes lead to: `data.loader.Loader` to one of `data`."""
        found = set()
        for name in names:
            if module not in self.paths:
                break
            found.add(self._defining(module, name))
            module = f"{module}.{name}"
        return found

    def _defining(self, module, name):
        """Return the module that defines what is imported as a name from a module."""
        seen = set()
        while module not in seen:
            seen.add(module)
            if name and f"{module}.{name}" in self.paths:
                return f"{module}.{name}"
            if name not in self._exports.get(module, ()):
                break
            module, name = self._exports[module][name]
        return module

    def _named(self, text):
        """Yield the modules that a text names, as a command line or a table does."""
        for name in (text, f"nnmpi.{text}") if MODULE.fullmatch(text) and "." in text else (text,):
            for module in (name, f"{name}.__main__"):
                if module in self.paths and name.startswith("nnmpi"):
                    yield module

    def _texts(self, module):
        """Return the texts of a module that are no docstrings."""
        said = {id(node.value) for node in self._nodes(module, ast.Expr)}
        return {
            node.value
            for node in self._nodes(module, ast.Constant)
            if isinstance(node.value, str) and id(node) not in said
        }

    def _nodes(self, module, *kinds):
        if module not in self._trees:
            by_kind = {}
            for node in ast.walk(ast.parse(self.paths[module].read_text())):
                by_kind.setdefault(type(node), []).append(node)
            self._trees[module] = by_kind
        return [node for kind in kinds for node in self._trees[module].get(kind, ())]


def _module_of(path):
    """Return the full name of the module in a file."""
    names = path.with_suffix("").parts
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


def _names(text, changed):
    """Return whether a text names a file: by its path, its name, or a folder that it is in."""
    if text == changed or (text == Path(changed).name and "." in text):
        return True
    folders = [folder.as_posix() for folder in Path(changed).parents if folder.as_posix() != "."]
    return text.rstrip("/") in folders


def _chain(node):
    """Return the names of `a.b.c`; none for attributes of anything else."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []
