"""The package keeps the rules of tests/layering, and the rules notice what breaks them."""

from pathlib import Path

import pytest

from tests.layering import layers
from tests.layering.rules import violations
from tests.planted.faults import FAULTS

ROOT = Path(__file__).parents[2]

# A small package that keeps all rules.
GOOD = {
    "__init__.py": '"""All."""\n',
    "base/__init__.py": '"""Base."""\n',
    "base/errors.py": '"""Errors."""\n',
    "tensor/__init__.py": (
        '"""Tensors."""\n\nfrom nnmpi.tensor.tape import Tape\n\n__all__ = ["Tape"]\n'
    ),
    "tensor/tape.py": (
        '"""The tape."""\n\nimport nnmpi.base.errors\n\n\nclass Tape:\n    """A tape."""\n'
    ),
    "nn/__init__.py": '"""Layers."""\n',
    "nn/linear.py": '"""Linear."""\n\nfrom nnmpi.tensor.tape import Tape\n',
}

# What is added to it, the file that is to be blamed, its line, and words of the sentence.
PLANTED = {
    "upwards": (
        {"tensor/up.py": '"""Up."""\n\nfrom nnmpi.nn.linear import Tape\n'},
        "tensor/up.py:3",
        "only lower layers",
    ),
    "upwards, for types": (
        {"tensor/up.py": '"""Up."""\n\nif TYPE_CHECKING:\n    from nnmpi.nn import linear\n'},
        "tensor/up.py:4",
        "only lower layers",
    ),
    "upwards, relative": (
        {"tensor/up.py": '"""Up."""\n\nfrom ..nn import linear\n'},
        "tensor/up.py:3",
        "only lower layers",
    ),
    "sideways": (
        {
            "optim/__init__.py": '"""O."""\n',
            "optim/sgd.py": '"""S."""\n\nimport nnmpi.tensor.tape\n',
        },
        "optim/sgd.py:3",
        "one layer do not import one another",
    ),
    "a stranger": (
        {
            "comm/__init__.py": '"""C."""\n',
            "comm/a.py": '"""A."""\n',
            "nn/b.py": '"""B."""\n\nimport nnmpi.comm.a\n',
        },
        "nn/b.py:3",
        "nn must not know comm",
    ),
    "no layer": ({"other/__init__.py": '"""O."""\n'}, "other/__init__.py:1", "is in no layer"),
    "a wing": (
        {
            "lab/__init__.py": '"""L."""\n',
            "lab/plan.py": '"""P."""\n',
            "nn/x.py": '"""X."""\n\nimport nnmpi.lab.plan\n',
        },
        "nn/x.py:3",
        "only lower layers",
    ),
    "a wing, in a string": (
        {"nn/x.py": '"""X."""\n\nNAME = "nnmpi.lab.plan"\n'},
        "nn/x.py:3",
        "names nnmpi.lab., a wing",
    ),
    "a wing, as a folder": (
        {"nn/x.py": '"""X."""\n\n\ndef _f(x):\n    return f"{x}/teaching/mpi_front/"\n'},
        "nn/x.py:5",
        "a wing",
    ),
    "another strategy": (
        {
            "parallel/__init__.py": '"""P."""\n',
            "parallel/data.py": '"""D."""\n',
            "parallel/experts.py": '"""A."""\n\nimport nnmpi.parallel.data\n',
        },
        "parallel/experts.py:3",
        "one strategy imports another",
    ),
    "a package's __init__": (
        {"nn/x.py": '"""X."""\n\nfrom nnmpi.tensor import Tape\n'},
        "nn/x.py:3",
        "the package nnmpi.tensor",
    ),
    "another writer of JSON": (
        {"nn/x.py": '"""X."""\n\nimport json\n\nTEXT = json.dumps({})\n'},
        "nn/x.py:5",
        "json.dumps; base/files.py",
    ),
    "nnmpi itself": ({"nn/x.py": '"""X."""\n\nimport nnmpi\n'}, "nn/x.py:3", "the package nnmpi;"),
    "an __init__ of others": (
        {
            "nn/__init__.py": (
                '"""N."""\n\nfrom nnmpi.tensor.tape import Tape\n\n__all__ = ["Tape"]\n'
            )
        },
        "nn/__init__.py:3",
        "exports only its own package",
    ),
    "mpi4py elsewhere": (
        {"nn/x.py": '"""X."""\n\nfrom mpi4py import MPI\n'},
        "nn/x.py:3",
        "only comm/mpi/ may",
    ),
    "mpi4py beside its folder": (
        {"comm/__init__.py": '"""C."""\n', "comm/x.py": '"""X."""\n\nfrom mpi4py import MPI\n'},
        "comm/x.py:3",
        "only comm/mpi/ may",
    ),
    "cupy elsewhere": (
        {"nn/x.py": '"""X."""\n\nimport importlib\n\nxp = importlib.import_module("cupy.cuda")\n'},
        "nn/x.py:5",
        "only backend/ may",
    ),
    "pickle": ({"nn/x.py": '"""X."""\n\nimport pickle\n'}, "nn/x.py:3", "nothing is pickled"),
    "a late import": (
        {"nn/x.py": '"""X."""\n\n\ndef _f():\n    import json\n'},
        "nn/x.py:5",
        "inside a function",
    ),
    "an option": (
        {
            "nn/x.py": (
                '"""X."""\n\n\ndef _f(n):\n    raise ValueError(f"{n} is too large; use'
                ' --batch-size 8")\n'
            )
        },
        "nn/x.py:5",
        "speaks of --batch-size",
    ),
    "an option that is a whole string": (
        {"nn/x.py": '"""X."""\n\nNAME = "--lr"\n'},
        "nn/x.py:3",
        "speaks of --lr",
    ),
    "a changing table": (
        {"nn/x.py": '"""X."""\n\nSEEN: dict[str, int] = {}\n\n\ndef _f(a):\n    SEEN[a] = 1\n'},
        "nn/x.py:7",
        "changes the module's SEEN",
    ),
    "a changing list": (
        {
            "nn/x.py": (
                '"""X."""\n\nSEEN = []\n\n\nclass _F:\n    def f(self):\n        SEEN.append(1)\n'
            )
        },
        "nn/x.py:8",
        "changes the module's SEEN",
    ),
    "no docstring": ({"nn/x.py": "x = 1\n"}, "nn/x.py:1", "the module has no docstring"),
    "a function without": (
        {"nn/x.py": '"""X."""\n\n\ndef f():\n    return 1\n'},
        "nn/x.py:4",
        "f has no docstring",
    ),
    "a method without": (
        {"nn/x.py": '"""X."""\n\n\nclass C:\n    """C."""\n\n    def m(self):\n        return 1\n'},
        "nn/x.py:7",
        "m has no docstring",
    ),
    "two meanings": (
        {"nn/b.py": '"""B."""\n\n\nclass Tape:\n    """Another."""\n'},
        "tensor/tape.py:6",
        "Tape is a type of nnmpi/nn/b.py:4, too",
    ),
    "an alias of another's name": (
        {"nn/b.py": '"""B."""\n\nTape: TypeAlias = int\n'},
        "tensor/tape.py:6",
        "Tape is a type of nnmpi/nn/b.py:3, too",
    ),
    "a module that is not there": (
        {"nn/x.py": '"""X.\n\nSee `tensor.tapes`.\n"""\n'},
        "nn/x.py:3",
        "names `tensor.tapes`, which does not exist",
    ),
    "a file that is not there": (
        {"nn/x.py": '"""X."""\n\n# see `tensor/tapes.py`\n'},
        "nn/x.py:3",
        "names `tensor/tapes.py`",
    ),
    "a name that a module does not have": (
        {"nn/x.py": '"""X: see `nnmpi.tensor.tape.Tapes`."""\n'},
        "nn/x.py:1",
        "names `nnmpi.tensor.tape.Tapes`",
    ),
    "a map with a module that is not there": (
        {"nn/x.py": '"""X -> tensor.tapes."""\n'},
        "nn/x.py:1",
        "tensor.tapes",
    ),
    "a circle": (
        {
            "nn/a.py": '"""A."""\n\nimport nnmpi.nn.b\n',
            "nn/b.py": '"""B."""\n\nfrom nnmpi.nn import a\n',
        },
        "nn/",
        "in a circle",
    ),
    "a circle for types": (
        {
            "nn/a.py": '"""A."""\n\nimport nnmpi.nn.b\n',
            "nn/b.py": '"""B."""\n\nif TYPE_CHECKING:\n    from nnmpi.nn import a\n',
        },
        "nn/",
        "in a circle",
    ),
}

# What looks like a breach and is none.
ALLOWED = {
    "a late import of an optional library": {
        "backend/x.py": '"""X."""\n\n\ndef _f():\n    import cupy\n'
    },
    "a module by way of its package": {"nn/x.py": '"""X."""\n\nfrom nnmpi.tensor import tape\n'},
    "an option in train": {"train/x.py": '"""X."""\n\nNAME = "--lr"\n'},
    "a command in a docstring": {"nn/x.py": '"""X.\n\nnnmpi train --lr 0.1\n"""\n'},
    "another program's option": {
        "nn/x.py": '"""X."""\n\nHELP = "enlarge it (docker run --shm-size)"\n'
    },
    "an arrow": {"nn/x.py": '"""X."""\n\nHELP = "x --border--> y `--[a]--> z a--b"\n'},
    "the user's names": {
        "__init__.py": '"""All."""\n\nfrom nnmpi.nn.linear import Tape\n\n__all__ = ["Tape"]\n'
    },
    "a local name like the module's": {
        "nn/x.py": '"""X."""\n\nx = []\n\n\ndef _f():\n    x = []\n    x.append(1)\n'
    },
    "names that exist": {
        "nn/x.py": '"""`tensor.tape.Tape.start`, `nn/x.py`, tensor.tape, `tensor.Tape`, `x.y`."""\n'
    },
}


def write(root, files):
    """Write the files into root/nnmpi; each package's `__init__` names its modules in a comment."""
    for name, text in files.items():
        path = root / "nnmpi" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for init in (root / "nnmpi").glob("*/__init__.py"):
        modules = " ".join(sorted(path.stem for path in init.parent.glob("*.py")))
        init.write_text(f"{init.read_text()}# {modules}\n")


def test_the_package_keeps_the_rules():
    result = violations(ROOT)
    assert not result, "\n" + "\n".join(result)


def test_faults_can_be_planted_in_the_lines_that_are_there():
    assert [
        item.name for item in FAULTS if (ROOT / item.file).read_text().count(item.before) != 1
    ] == []


def test_the_small_package_keeps_them_too(tmp_path):
    write(tmp_path, GOOD)
    assert violations(tmp_path) == []


def test_a_module_that_its_package_does_not_describe_is_found(tmp_path):
    write(tmp_path, GOOD)
    (tmp_path / "nnmpi/nn/conv.py").write_text('"""Convolution."""\n')
    (sentence,) = violations(tmp_path)
    assert sentence.startswith("nnmpi/nn/conv.py:1:")
    assert "does not say what conv is for" in sentence


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_breach_is_found(name, tmp_path):
    files, blamed, words = PLANTED[name]
    write(tmp_path, GOOD | files)
    result = violations(tmp_path)
    assert len(result) == 1, result
    assert result[0].startswith(f"nnmpi/{blamed}")
    assert words in result[0]


@pytest.mark.parametrize("name", ALLOWED)
def test_what_is_allowed_is_not_found(name, tmp_path):
    files = ALLOWED[name]
    write(
        tmp_path,
        GOOD
        | {f"{path.partition('/')[0]}/__init__.py": '"""P."""\n' for path in files if "/" in path}
        | files,
    )
    assert violations(tmp_path) == []


def test_every_exception_is_needed():
    texts = [path.read_text() for path in (ROOT / "nnmpi").rglob("*.py")]
    for flag in layers.FOREIGN_FLAGS:
        assert any(flag in text for text in texts), (
            f"nothing speaks of {flag} any more; remove the exception"
        )
    for path, target in layers.LATE_IMPORTS:
        text = (ROOT / path).read_text()
        assert target in text, f"{path} does not import {target} any more; remove the exception"
