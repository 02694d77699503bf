"""Compiling CUDA C++ for the host by g++, and keeping the library on disk by its contents."""

import ctypes
import fcntl
import hashlib
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from .source import Parameter, kernels

PRELUDE = Path(__file__).with_name("prelude.h")

# Misaligned addresses, overflow and bad shifts stop the kernel; everything else is as fast as it compiles quickly.
FLAGS = (
    *("-std=c++17", "-O1", "-fPIC", "-shared", "-ffp-contract=off", "-fno-stack-protector", "-U_FORTIFY_SOURCE"),
    "-fsanitize=alignment,signed-integer-overflow,shift,integer-divide-by-zero,bounds",
    "-fsanitize-undefined-trap-on-error",
    *("-Wall", "-Wno-unknown-pragmas", "-Wno-unused-function", "-Wno-unused-variable", "-Wno-class-memaccess"),
)


class CompileError(Exception):
    """What g++ said."""


@cache
def library(code: str, options: tuple[str, ...]) -> tuple[ctypes.PyDLL, dict[str, tuple[Parameter, ...]]]:
    """Return the library of a source, and its kernels' parameters.

    Only one thread at a time can be in it, as there is but one set of stacks: PyDLL keeps the interpreter's lock.
    """
    found = kernels(code, options)
    source = "\n".join(
        [f'#include "{PRELUDE.name}"', "#line 1", code, *(_launcher(name, each) for name, each in found.items())]
    )
    defines = [option for option in options if option.startswith("-D")]
    return ctypes.PyDLL(str(_compiled(source, defines))), found


def _launcher(name: str, parameters: tuple[Parameter, ...]) -> str:
    """Return the C++ function that starts a kernel, given its sizes and the addresses of its arguments."""
    values = ", ".join(f"*({each.declared.replace('const', '')}*)values[{i}]" for i, each in enumerate(parameters))
    return f"""
static void emulated_body_{name}(void** values) {{ (void)values; {name}({values}); }}
extern "C" __attribute__((visibility("default"))) int emulated_launch_{name}(
    const unsigned* sizes, void** values, int backwards, char* text, size_t size) {{
    return emulated::launch(emulated_body_{name}, sizes, values, backwards, text, size);
}}"""


def _compiled(source: str, defines: list[str]) -> Path:
    """Return the path of the library; of several processes at once one compiles, and the others wait for it."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (PRELUDE.read_bytes(), source.encode(), *map(str.encode, (*defines, *FLAGS))):
        digest.update(part + b"\x1f")
    folder = Path(tempfile.gettempdir()) / f"nnmpi-emulator-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    path = folder / f"{digest.hexdigest()}.so"
    if path.exists():
        return path
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            text, fresh = path.with_suffix(".cpp"), path.with_suffix(f".{os.getpid()}")
            text.write_text(source)
            command = ["g++", *FLAGS, *defines, f"-I{PRELUDE.parent}", "-o", str(fresh), str(text)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode or done.stderr.strip():
                raise CompileError(done.stderr)
            fresh.rename(path)
    return path
