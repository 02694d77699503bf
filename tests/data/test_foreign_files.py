"""Files that anybody may have written are read in bounded time, or refused in an OSError or
ValueError.
"""

import gzip
import json
import os
import random
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from nnmpi import NnmpiError
from nnmpi.base.errors import CheckpointError, DataError, UsageError, translated
from nnmpi.base.files import foreign, read_json
from nnmpi.data import load, load_tokenizer
from nnmpi.data.images import read_idx
from nnmpi.data.tokenizer import CharacterTokenizer
from nnmpi.models.pretrained import (
    CONFIG,
    WEIGHTS,
    GPTSize,
    read_dropout,
    read_size,
    save_pretrained,
)
from nnmpi.train.checkpoint import TensorFile
from nnmpi.train.metrics import read_metrics


@pytest.mark.parametrize("text", ["[" * 100_000, "1" * 5_000, "{", b"\xff"])
def test_no_text_is_worse_than_a_wrong_value(tmp_path, text):
    file = tmp_path / "a.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError):  # noqa: PT011
        read_json(file)


def test_nobody_waits_for_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        for read in (read_json, read_metrics):
            with pytest.raises((OSError, UsageError), match="not an ordinary file"):
                read(place)
        with pytest.raises(CheckpointError, match="not an ordinary file"):
            TensorFile(place)


@pytest.mark.parametrize(
    "error", [ValueError("no"), MemoryError(), BaseException("a panic of Rust's")]
)
def test_whatever_a_library_raises_is_a_sentence(tmp_path, error):
    (tmp_path / "a").touch()
    with (
        pytest.raises(DataError, match=r"a: damaged \("),
        foreign(tmp_path / "a", DataError, "damaged"),
    ):
        raise error


def test_a_folder_in_place_of_a_file_is_a_sentence(tmp_path):
    with pytest.raises(IsADirectoryError) as raised:
        tmp_path.read_text()
    assert "cannot be used (Is a directory); give another" in str(translated(raised.value))


@pytest.mark.parametrize("words", ["report LONG", "predict LONG x.png", "evaluate LONG"])
def test_a_name_that_the_system_refuses_is_a_sentence(words):
    command = [sys.executable, "-m", "nnmpi", *words.replace("LONG", "a" * 300).split()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "(File name too long)" in done.stderr
    assert "Traceback" not in done.stderr


def altered(content, draw):
    """Return a file of which some bytes are others, too many or gone; or a value of its JSON is of
    another kind.
    """
    if draw.random() < 0.5 and content[:1] == b"{":
        form = json.loads(content)
        place, key = form, draw.choice(list(form))
        while isinstance(place[key], dict | list) and place[key] and draw.random() < 0.7:
            place = place[key]
            key = (
                draw.choice(list(place)) if isinstance(place, dict) else draw.randrange(len(place))
            )
        place[key] = draw.choice(
            [None, True, -1, 2**31, 10**400, 0.5, "x", [], {}, [[1]], {"a": 1}]
        )
        return json.dumps(form).encode()
    at, many = draw.randrange(len(content)), draw.choice([0, 1, 5, 100])
    return content[:at] + draw.randbytes(draw.choice([0, 1, 4])) + content[at + many :]


def test_altered_files_are_read_or_refused_in_a_sentence(tmp_path):
    """Each kind that there is; a seed that found something new is added to the range."""
    size = GPTSize(11, 8, 4, 1, 2)
    save_pretrained(tmp_path, size.build().initialize().state(), size)
    table, weights = b"a,b,label\n" + b"1,2,x\n3,4,y\n" * 5, (tmp_path / WEIGHTS).read_bytes()
    np.savez(tmp_path / "a.npz", x=np.ones((6, 2)), y=np.arange(6) % 2)
    corpus = {
        "a.npz": ((tmp_path / "a.npz").read_bytes(), lambda file: load(str(file))),
        "b.csv": (table, lambda file: load(str(file))),
        "c.csv.gz": (gzip.compress(table), lambda file: load(str(file))),
        "d.gz": (gzip.compress(b"\0\0\x08\x01\0\0\0\x0512345"), lambda file: read_idx(file, 1)),
        CONFIG: (
            (tmp_path / CONFIG).read_bytes(),
            lambda file: (read_size(file.parent), read_dropout(file.parent)),
        ),
        WEIGHTS: (weights, lambda file: dict(TensorFile(file))),
        "tokenizer.json": (
            CharacterTokenizer("abc").to_json().encode(),
            lambda file: load_tokenizer(file),
        ),
    }
    for name, (content, read) in corpus.items():
        for seed in range(60):
            (tmp_path / name).write_bytes(altered(content, random.Random(seed)))
            with suppress(NnmpiError):
                read(tmp_path / name)
        (tmp_path / name).write_bytes(content)
