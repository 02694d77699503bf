"""Which modules a simulated rank has for itself, and which all ranks share.

Under mpirun a process has all its modules to itself, and keeps what it likes in them: a helper
library its communicator, its rank. So a simulated rank imports a module anew, wherever it lies:

    own       the program, modules in its folder, packages written in Python
    shared    Python's library; nnmpi; what was imported before the ranks began; packages with
              compiled modules, which a process loads once (NumPy, PyTorch, pandas), and those that
              they import, since they ask for their classes

A package with compiled modules is each rank's own, but for these, if it holds something of
mpi4py's.
"""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from itertools import chain
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from nnmpi.comm.simulated.scheduler import PACKAGE_FOLDER

OWN = "__main__", "mpi4py", "random", "signal", "atexit"
# Cython keeps here what all modules that it compiled share
NEVER_OWN = "cython_runtime", "_cython_"
COMPILED = ".so"
INSTALLED = "-packages/"  # site-packages, Debian's dist-packages


def find_file(module: Any) -> str:
    """Return a module's file, a package's first folder, or "" for one without."""
    return getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), "")


def _package(name: str) -> str:
    return name.partition(".")[0]


def _is_compiled(module: Any) -> bool:
    """Return whether a module is compiled, or is a package in which some are."""
    folders = (Path(folder).rglob(f"*{COMPILED}") for folder in getattr(module, "__path__", ()))
    return find_file(module).endswith(COMPILED) or any(chain.from_iterable(folders))


def _sources(module: ModuleType) -> set[str]:
    """Return the packages from which a module has its variables."""
    names = []
    for value in list(vars(module).values()):
        if type(value) is ModuleType:
            names.append(value.__name__)
        else:  # of other objects the class is asked: some answer any name, or import something
            kind = value if isinstance(value, type | FunctionType) else type(value)
            names.append(kind.__module__)
    return {_package(name) for name in names if isinstance(name, str)}


class RankModules:
    """Finds the modules that are each rank's own; on `sys.meta_path`, gives ranks compiled ones.

    Args:
        folder: of the program.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.shared = {name for name in list(sys.modules) if _package(name) not in OWN}
        self._is_own = dict.fromkeys(map(_package, self.shared), False) | dict.fromkeys(OWN, True)
        self._compiled: dict[str, ModuleType] = {}

    def find(self) -> list[str]:
        """Return the names of the imported modules that are the present rank's own."""
        new = [name for name in list(sys.modules) if name not in self.shared]
        for name in new:
            if (top := _package(name)) not in self._is_own:
                self._is_own[top] = self._is_written_in_python(top)
        self._share([name for name in new if not self._is_own[_package(name)]])
        own = [name for name in new if self._is_own[_package(name)]]
        self.shared.update({*new}.difference(own))
        modules = {name: sys.modules[name] for name in own}
        self._compiled |= {
            name: module for name, module in modules.items() if find_file(module).endswith(COMPILED)
        }
        return own

    def _is_written_in_python(self, top: str) -> bool:
        module = sys.modules.get(top)
        file = find_file(module)
        if file.startswith(PACKAGE_FOLDER) or top.startswith(NEVER_OWN):
            return False
        if file.startswith(self.folder) and INSTALLED not in file:
            return True
        return top not in sys.stdlib_module_names and not _is_compiled(module)

    def _share(self, names: list[str]) -> None:
        """Decide on packages by what the modules of shared ones hold."""
        for name in names:  # which grows
            top = _package(name)
            if self._is_own[top] or top in sys.stdlib_module_names:
                continue
            sources = _sources(sys.modules[name])
            if "mpi4py" in sources:
                self._is_own[top] = True
                self.shared -= {other for other in self.shared if _package(other) == top}
                continue
            for source in sources:
                inside = [other for other in list(sys.modules) if _package(other) == source]
                if (
                    self._is_own.get(source)
                    and source not in OWN
                    and not find_file(sys.modules[inside[0]]).startswith(self.folder)
                    and not any("mpi4py" in _sources(sys.modules[other]) for other in inside)
                ):
                    self._is_own[source] = False
                    names += inside

    # ---- the finder and loader of compiled modules ----

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Find a compiled module that another rank has loaded."""
        loader: Any = self
        return spec_from_loader(name, loader) if name in self._compiled else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return it."""
        return self._compiled[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: it has run."""
