"""The examples in docstrings print what they say."""

import doctest
import inspect
import re
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import nnmpi

pytestmark = pytest.mark.host_only("what is printed is NumPy's")

ROOT = Path(nnmpi.__file__).parent
MODULES = sorted(
    ".".join(("nnmpi", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    for path in ROOT.rglob("*.py")
    if re.search(r"^ +>>> ", path.read_text(), re.MULTILINE)
)
NAMES = {"np": np, "nnmpi": nnmpi} | {
    name: value for name in nnmpi.__all__ if inspect.ismodule(value := getattr(nnmpi, name))
}


@pytest.mark.parametrize("module", MODULES)
def test_examples_print_what_they_say(module, tmp_path, monkeypatch):
    """They begin with NumPy as np, nnmpi and its packages imported, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    if module.startswith("nnmpi.lab.onnx"):
        pytest.importorskip("onnx")
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    failed, tried = doctest.testmod(import_module(module), extraglobs=NAMES, optionflags=flags)
    assert tried and not failed


def test_every_public_name_has_one():
    """Of `nnmpi.__all__`, but for packages."""
    values = {name: getattr(nnmpi, name) for name in nnmpi.__all__}
    named = {name: value for name, value in values.items() if not inspect.ismodule(value)}
    assert not [name for name, value in named.items() if ">>>" not in (value.__doc__ or "")]
