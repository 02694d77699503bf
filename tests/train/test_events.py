"""TensorBoard's files hold the numbers of records, and nothing else."""

import struct
from pathlib import Path
from typing import Any

import pytest

from nnmpi.train.folder import RunFolder
from nnmpi.train.metrics import EventFile, MetricsRecorder, read_metrics


def read_events(folder: Path) -> list[Any]:
    """Return the events of the one file there, whose frames hold."""
    events = pytest.importorskip("tensorboardX.proto.event_pb2")
    crc = pytest.importorskip("tensorboardX.record_writer").masked_crc32c
    (file,) = folder.iterdir()
    content, found = file.read_bytes(), []
    while content:
        (length,) = struct.unpack_from("<Q", content)
        data = content[12 : 12 + length]
        assert struct.unpack_from("<I", content, 8)[0] == crc(content[:8])
        assert struct.unpack_from("<I", content, 12 + length)[0] == crc(data)
        found.append(events.Event.FromString(data))
        content = content[16 + length :]
    return found


def test_lists_and_what_is_no_finite_number_are_left_out(tmp_path: Path) -> None:
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
    file = EventFile(tmp_path / "events", first_step=5)
    file.close()
    assert not list(tmp_path.iterdir())  # nothing is there before there is something to write
    file.write(record)
    file.write({"kind": "train", "global_step": 8, "epoch": 1.0, "loss": 0.5})
    file.close()
    version, purge, *events = read_events(tmp_path / "events")
    assert version.file_version == "brain.Event:2" and (purge.step, purge.session_log.status) == (5, 1)
    assert [(value.tag, value.simple_value, each.step) for each in events for value in each.summary.value] == [
        ("staleness/mean", 1.25, 7),
        ("staleness/max", 3, 7),
        ("staleness/lead", 0, 7),
        ("train/loss", 0.5, 8),
    ]


def test_a_new_run_drops_nothing(tmp_path: Path) -> None:
    file = EventFile(tmp_path, first_step=0)
    file.write({"kind": "train", "global_step": 1, "loss": 0.5})
    file.close()
    assert [each.step for each in read_events(tmp_path)] == [0, 1]


def test_a_full_disk_costs_only_the_picture(tmp_path: Path) -> None:
    """It is the writer's call that fails, and no thread of a library's, whose exception would end the job."""
    pytest.importorskip("tensorboardX")
    recorder = MetricsRecorder(RunFolder(tmp_path), 0)
    (tmp_path / "tensorboard").symlink_to("/dev/full")
    recorder.write({"kind": "train", "global_step": 1, "loss": 0.5})
    recorder.__exit__(None, None, None)
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1
