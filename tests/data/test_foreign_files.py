"""Files that anybody may have written are read in bounded time, or refused in an OSError or ValueError."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nnmpi.errors import CheckpointError, DataError
from nnmpi.files import foreign, read_json
from nnmpi.train.checkpoint import TensorFile
from nnmpi.train.metrics import read_metrics


def test_a_value_comes_back(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"a": [1, 2.5, "ä"]}', encoding="utf-8")
    assert read_json(file) == {"a": [1, 2.5, "ä"]}


@pytest.mark.parametrize("text", ["[" * 100_000, "1" * 5_000, "{", b"\xff"])
def test_no_text_is_worse_than_a_wrong_value(tmp_path: Path, text: str | bytes) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError):  # noqa: PT011
        read_json(file)


def test_nobody_waits_for_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        for read in (read_json, read_metrics):
            with pytest.raises(OSError, match="not an ordinary file"):
                read(place)
        with pytest.raises(CheckpointError, match="not an ordinary file"):
            TensorFile(place)


@pytest.mark.parametrize("error", [ValueError("no"), MemoryError(), BaseException("a panic of Rust's")])
def test_whatever_a_library_raises_is_a_sentence(tmp_path: Path, error: BaseException) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(DataError, match=r"a: damaged \("), foreign(tmp_path / "a", DataError, "damaged"):
        raise error


@pytest.mark.parametrize("words", ["report LONG", "predict LONG x.png", "evaluate LONG"])
def test_a_name_that_the_system_refuses_is_a_sentence(words: str) -> None:
    command = [sys.executable, "-m", *f"nnmpi.{words}".replace("LONG", "a" * 300).split()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "cannot be used (File name too long); give another" in done.stderr
    assert "Traceback" not in done.stderr
