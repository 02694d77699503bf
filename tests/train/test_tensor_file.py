"""Files of arrays: the safetensors library reads what is written here, and what it writes is read
here.
"""

import json
import tracemalloc
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from nnmpi.base.errors import CheckpointError
from nnmpi.base.files import read_json, sha256
from nnmpi.parallel.model_state import ArraySpec
from nnmpi.train.checkpoint import CheckpointWriter, TensorFile
from nnmpi.train.signature import ModelSignature

ARRAYS = {
    "plain": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    "transposed": np.arange(12, dtype=np.float32).reshape(3, 4).T,
    "fortran": np.asfortranarray(np.arange(12, dtype=np.float64).reshape(3, 4)),
    "strided": np.arange(40, dtype=np.float32).reshape(8, 5)[::2, ::3],
    "reversed": np.arange(6, dtype=np.float32)[::-1],
    "broadcast": np.broadcast_to(np.float32(3), (2, 5)),
    "scalar": np.asarray(7.0),
    "empty": np.zeros((0, 3), dtype=np.float32),
    "count": np.asarray([5], dtype=np.int64),
    "flags": np.asarray([True, False]),
    'Gr\u00f6\u00dfe \\ "0"': np.asarray([1], dtype=np.uint8),
}


def write(folder, arrays):
    """Return the only file of arrays of a new checkpoint."""
    writer = CheckpointWriter(folder, 1)
    writer.begin()
    writer.open("file", {name: ArraySpec.of(array) for name, array in arrays.items()})
    for name, array in arrays.items():
        writer.write(name, array)
    return folder / writer.finish({}, keep=1) / "file"


def assert_same(found, expected):
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert (found[name].shape, found[name].dtype) == (array.shape, array.dtype), name
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_the_library_reads_what_is_written(tmp_path):
    for number, arrays in enumerate((ARRAYS, dict(reversed(ARRAYS.items())), {})):
        file = write(tmp_path / f"{number}", arrays)
        assert_same(load_file(file), arrays)
        facts = {"bytes": file.stat().st_size, "sha256": sha256(file)}
        assert read_json(file.with_name("state.json"))["files"] == {"file": facts}


def test_what_the_library_writes_is_read(tmp_path):
    arrays = {name: np.array(array, order="C") for name, array in ARRAYS.items()}
    save_file(arrays, tmp_path / "file")
    result = TensorFile(tmp_path / "file")
    assert_same({name: result[name] for name in result.specs}, arrays)


def test_one_array_is_in_memory_at_a_time(tmp_path):
    specs = {f"{number}": ArraySpec((1000, 125), "float64") for number in range(10)}  # 1 MB each
    writer = CheckpointWriter(tmp_path, 1)
    writer.begin()
    tracemalloc.start()
    try:
        writer.open("file", specs)
        for number, name in enumerate(specs):
            writer.write(name, np.full((1000, 125), number, np.float64))
        result = TensorFile(tmp_path / writer.finish({}, keep=1) / "file")
        assert [result[name][-1, -1] for name in specs] == list(range(10))
        assert tracemalloc.get_traced_memory()[1] < 3e6
    finally:
        tracemalloc.stop()


def test_a_damaged_file_and_an_unknown_name_are_refused(tmp_path):
    (tmp_path / "bad").write_bytes(b"\x10" + bytes(40))
    for name in ("bad", "absent"):
        with pytest.raises(CheckpointError, match=f"{name}: cannot be read"):
            TensorFile(tmp_path / name)
    with pytest.raises(CheckpointError, match="nothing"):
        TensorFile(write(tmp_path / "folder", ARRAYS))["nothing"]


@pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="only Linux lists a process's maps"
)
def test_a_file_is_not_kept_open(tmp_path):
    """A checkpoint that a run began from is removed while it goes on, and then takes up no place on
    the disk.
    """
    file = write(tmp_path, ARRAYS)
    result = TensorFile(file)
    assert result["count"] == 5
    assert str(file) not in Path("/proc/self/maps").read_text()
    file.unlink()
    with pytest.raises(CheckpointError, match="file: cannot be read .*No such file"):
        result["count"]


@pytest.mark.parametrize(
    "values",
    [
        "x",
        3,
        {},
        {"nothing": 1},
        {"mean": {"a": 1}},
        {"class_names": [1, 2]},
        {"sample_shape": 4},
        {"scale": None},
    ],
)
def test_a_signature_of_other_kinds_is_refused(values):
    """It stands in the metadata of weights that may be anybody's."""
    right = asdict(ModelSignature("iris", (4,), 3))
    wrong = right | values if isinstance(values, dict) and values else values
    with pytest.raises(CheckpointError, match="the signature of the weights cannot be read"):
        ModelSignature.from_json(wrong)
    assert ModelSignature.from_json(json.loads(json.dumps(right))) == ModelSignature(
        "iris", (4,), 3
    )
