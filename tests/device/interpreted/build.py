"""Building the interpreted device by g++: libraries in the place of CUDA's, kept on disk by their
contents.
"""

import fcntl
import hashlib
import os
import re
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
FLAGS = (
    *(
        "g++",
        "-std=c++20",
        "-O2",
        "-g1",
        "-fPIC",
        "-fvisibility=hidden",
        "-Wall",
        "-Wextra",
        "-Wno-unused-parameter",
    ),
    *("-mfma", "-mf16c", "-ffp-contract=off", "-frounding-math", "-fwrapv", f"-I{HERE}"),
)
DRIVER, PRODUCTS, UNUSED = "libcuda.so.1", "libcublas.so.13", "libcublasLt.so.13"
JUMP = 13  # bytes of code


def build(runtime, cublas):
    """Return the folder of the libraries for CuPy's two modules; of several processes one builds,
    and others wait.
    """
    digest = hashlib.blake2b(digest_size=16)
    for file in (*sorted(HERE.glob("*.cpp")), *sorted(HERE.glob("*.h")), Path(__file__), runtime):
        digest.update(file.read_bytes())
    folder = Path(tempfile.gettempdir()) / f"nnmpi-interpreted-{os.getuid()}" / digest.hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "built").exists():
            _build(folder, runtime, cublas)
            (folder / "built").touch()
    return folder


def _build(folder, runtime, cublas):
    (folder / "hooks.cpp").write_text(_hooks(runtime))
    (folder / "lacking.cpp").write_text(_lacking(cublas))
    (folder / "versions").write_text(f"{PRODUCTS} {{ global: *; }};")
    (folder / "nothing.cpp").write_text("")
    places = {
        **{path.stem: path for path in HERE.glob("*.cpp")},
        **{path.stem: path for path in folder.glob("*.cpp")},
    }
    running = [
        subprocess.Popen([*FLAGS, "-c", str(path), "-o", str(folder / f"{stem}.o")])
        for stem, path in places.items()
    ]
    codes = [item.wait() for item in running]
    if any(codes):
        raise RuntimeError("g++ cannot build the interpreted device")
    versions = f"-Wl,--version-script={folder / 'versions'}"
    for library, stems, more in (
        (DRIVER, ("read", "work", "run", "device", "hooks"), []),
        (
            PRODUCTS,
            ("blas", "lacking"),
            [versions, f"-L{folder}", f"-l:{DRIVER}", f"-Wl,-rpath,{folder}"],
        ),
        (UNUSED, ("nothing",), []),
    ):
        objects = [str(folder / f"{stem}.o") for stem in stems]
        command = [
            "g++",
            "-shared",
            f"-Wl,-soname,{library}",
            "-o",
            str(folder / library),
            *objects,
            *more,
        ]
        subprocess.run(command, check=True)


def _hooks(runtime):
    """Return the table of the functions of the run-time library that CuPy's module has in it, and
    what they become.
    """
    lines = subprocess.run(
        ["nm", "-S", str(runtime)], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    result = re.findall(r"^(\w+) (\w+) [tT] cuda([A-Z]\w*)$", "\n".join(lines), re.MULTILINE)
    places = {name: place for place, size, name in result if int(size, 16) >= JUMP}
    text = (HERE / "device.cpp").read_text()
    there = {*re.findall(r"CUDART\((\w+)\)", text), *re.findall(r"device_cuda(\w+)\(", text)}
    code = ["#include <cstddef>", "#include <cstdint>", 'extern "C" int device_lacks(const char*);']
    for name in places:
        body = ";" if name in there else f'{{ return device_lacks("cuda{name}"); }}'
        code.append(f'extern "C" int device_cuda{name}(){body}')
    rows = "".join(f"{{0x{place}, (void*)device_cuda{name}}}," for name, place in places.items())
    code.append(
        f"struct Hook {{ uint64_t place; void* instead; }}; extern const Hook hooks[] = {{{rows}}};"
    )
    code.append(f"extern const size_t hook_count = {len(places)};")
    return "\n".join(code)


def _lacking(cublas):
    """Return functions that fail, for all of cuBLAS that CuPy's module wants and that is not
    here.
    """
    command = ["nm", "-D", "--undefined-only", str(cublas)]
    names = set(
        re.findall(
            r"U (cublas\w+)",
            subprocess.run(command, capture_output=True, text=True, check=True).stdout,
        )
    )
    text = (HERE / "blas.cpp").read_text()
    there = {f"cublas{x}" for x in re.findall(r"cublas(\w+)\(", text)}
    there |= {
        f"cublas{letter}{rest}"
        for letter in "SD"
        for rest in ("gemm_v2", "gemmBatched", "gemmStridedBatched")
    }
    code = ['extern "C" int device_lacks(const char*);']
    exported = 'extern "C" __attribute__((visibility("default")))'
    code += [
        f'{exported} int {name}() {{ device_lacks("{name}"); return 15; }}'
        for name in sorted(names - there)
    ]
    return "\n".join(code)
