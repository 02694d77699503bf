"""Models of one's own: built from a file or a module, and what is wrong with them said in a sentence."""

from pathlib import Path

import pytest

from nnmpi.comm.group import Group
from nnmpi.custom import is_custom, short_name
from nnmpi.errors import UsageError
from nnmpi.train.build import build_model
from nnmpi.train.cli import main
from nnmpi.train.config import ModelConfig, assemble
from nnmpi.train.folder import default_folder
from tests.data.locked import lock

NET = """
from nnmpi import nn


class Wide(nn.Module):
    def __init__(self, inputs, classes):
        self.flat, self.out = nn.Flatten(), nn.Linear(inputs, classes)

    def forward(self, x):
        return self.out(self.flat(x))


def build(sample_shape, classes):
    size = 1
    for length in sample_shape:
        size *= length
    return nn.Sequential(Wide(size, 7), nn.ReLU(), nn.Linear(7, classes))


def broken(sample_shape, classes):
    return 1 + ""


def number(sample_shape, classes):
    return 3


def alone():
    return nn.Sequential()
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a file with models."""
    path = tmp_path / "net.py"
    path.write_text(NET)
    return path


def test_a_model_from_a_file_is_trained(file: Path, tmp_path: Path, group: Group) -> None:
    out = tmp_path / "run"
    main(f"--model {file}:build --dataset iris --epochs 1 --out {out}".split(), group)
    assert (out / "checkpoints" / "latest").exists()


def test_a_model_from_a_module() -> None:
    model = build_model(ModelConfig("nnmpi.models:cnn"), (8, 8, 1), 3).initialize()
    assert model.storage.size > 0


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("{file}:nothing", "has no function 'nothing'"),
        ("{file}:number", "gave a int; return a nnmpi.nn.Module"),
        ("{file}:alone", r"takes 0 positional arguments but 2 were given; define alone\(sample_shape, classes\)"),
        ("{folder}/none.py:build", "there is no file .*none.py"),
        ("no.such.module:build", "there is no module no.such.module"),
    ],
)
def test_what_is_wrong_is_said(file: Path, name: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        build_model(ModelConfig(name.format(file=file, folder=file.parent)), (4,), 3)


def test_a_file_that_cannot_be_read_is_one_sentence(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock(file.parent, monkeypatch)
    with pytest.raises(UsageError, match=rf"--model {file}:build: {file} cannot be read \(Permission denied\)$"):
        build_model(ModelConfig(f"{file}:build"), (4,), 3)


def test_a_fault_inside_the_function_is_not_hidden(file: Path) -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        build_model(ModelConfig(f"{file}:broken"), (4,), 3)


def test_names() -> None:
    assert is_custom("a/b.py:net")
    assert not is_custom("cnn")
    assert not is_custom(":net")
    assert not is_custom("a.py:")
    assert short_name("a/mine.py:build") == "mine-build"
    assert short_name("nets.mine:build") == "mine-build"
    assert "/" not in default_folder(assemble({"model": "a/b.py:net"}), Path("r")).name
