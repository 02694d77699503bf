"""Files that anybody may have written are read in bounded time, or refused in an OSError or ValueError."""

import os
from pathlib import Path

import pytest

from nnmpi.files import read_json


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
        with pytest.raises(OSError, match="not an ordinary file"):
            read_json(place)
