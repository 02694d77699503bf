"""TensorBoard's files hold the numbers of records, and nothing else."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nnmpi.train import metrics
from nnmpi.train.metrics import EventFile


class Writer:
    """Keeps what is written."""

    def __init__(self, folder: str, purge_step: int | None) -> None:
        self.folder, self.purge_step, self.open = folder, purge_step, True
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def close(self) -> None:
        self.open = False


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> list[Writer]:
    """Stands in for tensorboardX; the writers that were made."""
    made: list[Writer] = []

    class Library:
        @staticmethod
        def SummaryWriter(folder: str, purge_step: int | None) -> Writer:  # noqa: N802
            made.append(Writer(folder, purge_step))
            return made[-1]

    monkeypatch.setattr(metrics.importlib, "import_module", lambda name: Library)
    return made


def test_lists_and_what_is_no_finite_number_are_left_out(library: list[Writer], tmp_path: Path) -> None:
    record: dict[str, Any] = {
        "kind": "staleness",
        "global_step": 7,
        "epoch": 0.5,
        "mean": 1.25,
        "max": 3,
        "lead": 0,
        "disagreement": float("nan"),
        "bytes": float("inf"),
        "messages": None,
        "workers": [{"worker": 0, "steps": 2, "histogram": [[0, 2]]}],
    }
    file = EventFile(tmp_path, first_step=5)
    file.write(record)
    file.write({"kind": "train", "global_step": 8, "epoch": 1.0, "loss": 0.5})
    file.close()
    (writer,) = library
    assert (writer.folder, writer.purge_step, writer.open) == (str(tmp_path), 5, False)
    assert writer.scalars == [
        ("staleness/mean", 1.25, 7),
        ("staleness/max", 3, 7),
        ("staleness/lead", 0, 7),
        ("train/loss", 0.5, 8),
    ]


def test_a_new_run_drops_nothing(library: list[Writer], tmp_path: Path) -> None:
    file = EventFile(tmp_path, first_step=0)
    file.close()
    assert not library  # nothing is loaded before there is something to write
    file.write({"kind": "train", "global_step": 1, "loss": 0.5})
    assert library[0].purge_step is None


def test_the_real_library_takes_a_record_with_lists(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    file = EventFile(tmp_path, first_step=0)
    file.write({"kind": "staleness", "global_step": 1, "epoch": 0.1, "mean": 1.5, "workers": [{"worker": 0}]})
    file.close()
    (written,) = tmp_path.iterdir()
    content = written.read_bytes()
    assert b"staleness/mean" in content
    assert b"workers" not in content


def test_pytorch_is_not_loaded_for_them(tmp_path: Path) -> None:
    """And can be loaded afterwards."""
    pytest.importorskip("tensorboardX")
    (tmp_path / "torch.py").write_text("class Tensor:\n    pass\n")
    program = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from pathlib import Path
from nnmpi.train.metrics import EventFile
file = EventFile(Path({str(tmp_path / "events")!r}), first_step=0)
file.write({{"kind": "train", "global_step": 1, "loss": 0.5}})
file.close()
assert "torch" not in sys.modules
import torch
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])
