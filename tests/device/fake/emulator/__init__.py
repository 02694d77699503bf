"""A stand-in for `cupy.RawModule` that compiles CUDA C++ by g++ and runs it on the host.

prelude.h   what CUDA's compiler knows by itself; threads of a block as fibers, with real barriers and shuffles
source      the kernels in a source, and their parameters' types
build       g++, and the libraries on disk
launch      the arguments as CuPy passes them, compared with the parameters: CuPy itself would pass nonsense on
"""

from .build import CompileError
from .launch import LaunchError
from .module import RawModule

__all__ = ["CompileError", "LaunchError", "RawModule"]
