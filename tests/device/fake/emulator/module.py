"""`RawModule` and `RawKernel` as CuPy has them."""

from typing import Any

from .build import library
from .launch import launch


class RawKernel:
    """One kernel. Compiled when it is first called."""

    def __init__(
        self,
        code: str,
        name: str,
        options: tuple[str, ...] = (),
        backend: str = "nvrtc",
        *,
        translate_cucomplex: bool = False,
        enable_cooperative_groups: bool = False,
        jitify: bool | None = None,
    ) -> None:
        _plain(options, backend, translate_cucomplex, enable_cooperative_groups, jitify)
        self.code, self.name, self.options, self.backend = code, name, options, backend
        self._found: Any = None

    def compile(self, log_stream: Any = None) -> None:
        """Compile the kernel now.

        Raises:
            CompileError: when g++ refuses the source or warns of it.
            LookupError: when the source has no such kernel.
        """
        compiled, found = library(self.code, self.options)
        if self.name not in found:
            raise LookupError(f"the source has no kernel {self.name}; it has {', '.join(sorted(found))}")
        self._found = compiled[f"emulated_launch_{self.name}"], found[self.name]

    def __call__(self, grid: Any, block: Any, args: Any, *, shared_mem: int = 0) -> None:
        """Run the kernel to its end; see `launch`."""
        if self._found is None:
            self.compile()
        function, parameters = self._found
        launch(function, self.name, parameters, grid, block, args, shared_mem)


class RawModule:
    """All kernels of a source. Compiled when the first one is asked for."""

    def __init__(
        self,
        code: str | None = None,
        *,
        path: str | None = None,
        options: tuple[str, ...] = (),
        backend: str = "nvrtc",
        translate_cucomplex: bool = False,
        enable_cooperative_groups: bool = False,
        name_expressions: Any = None,
        jitify: bool | None = None,
    ) -> None:
        _plain(options, backend, translate_cucomplex, enable_cooperative_groups, jitify)
        if code is None or path is not None or name_expressions is not None:
            raise NotImplementedError("the emulator has modules from code with extern C kernels alone")
        self.code, self.options, self.backend = code, options, backend

    def compile(self, log_stream: Any = None) -> None:
        """Compile the module now; errors are those of `RawKernel.compile`."""
        library(self.code, self.options)

    def get_function(self, name: str) -> RawKernel:
        """Return one of its kernels; errors are those of `RawKernel.compile`."""
        kernel = RawKernel(self.code, name, self.options, self.backend)
        kernel.compile()
        return kernel


def _plain(options: Any, backend: str, complex_: bool, cooperative: bool, jitify: bool | None) -> None:
    if not isinstance(options, tuple) or not all(isinstance(option, str) for option in options):
        raise TypeError(f"options are a tuple of str, not {options!r}")
    if backend != "nvrtc" or complex_ or cooperative or jitify:
        raise NotImplementedError("the emulator has neither nvcc, cooperative groups, complex numbers nor Jitify")
