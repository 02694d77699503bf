"""Checkpoints come back bit for bit, are whole or absent, and damage is found and named."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnmpi.backend.array import Array
from nnmpi.base import files
from nnmpi.base.errors import CheckpointError
from nnmpi.parallel.model_state import ArraySpec
from nnmpi.train import checkpoint as module
from nnmpi.train.checkpoint import (
    MODEL_FILE,
    OPTIMIZER_FILE,
    CheckpointWriter,
    load_checkpoint,
    read_checkpoint,
)
from tests.harness.refusals import refuses


@dataclass
class Content:
    model: Mapping[str, Array]
    optimizer: Mapping[str, Array]
    state: Mapping[str, Any]


def save(folder, content, keep, best_step=0):
    """Write a checkpoint as a run does."""
    draft = CheckpointWriter(folder, content.state["step"])
    try:
        draft.begin()
        for name, arrays in ((MODEL_FILE, content.model), (OPTIMIZER_FILE, content.optimizer)):
            draft.open(name, {key: ArraySpec.of(array) for key, array in arrays.items()})
            for key, array in arrays.items():
                draft.write(key, array)
        return folder / draft.finish(content.state, keep, best_step)
    finally:
        draft.discard()


def make(step, value=0.0):
    weights = {"w": np.full((2, 3), value, dtype=np.float32)}
    return Content(weights, {"m/w": weights["w"] + 1}, {"step": step, "epoch": 2, "third": 1 / 3})


def names(folder):
    return sorted(item.name for item in folder.iterdir())


def test_state_comes_back_and_equal_checkpoints_have_equal_bytes(tmp_path):
    first, second = (save(tmp_path / name, make(7, 1.5), keep=1) for name in "ab")
    assert read_checkpoint(first).values == {"step": 7, "epoch": 2, "third": 1 / 3}
    assert names(first) == ["model.safetensors", "optimizer.safetensors", "state.json"]
    for name in names(first):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_only_the_newest_and_the_best_are_kept_and_latest_names_the_last(tmp_path):
    for step in (1, 2, 3, 10):
        save(tmp_path, make(step), keep=2, best_step=1)
    kept = ["step-00000001", "step-00000003", "step-00000010"]
    assert names(tmp_path) == ["latest", *kept]
    assert (tmp_path / "latest").read_text() == "step-00000010\n"


def test_folders_with_something_else_in_them_are_not_removed(tmp_path):
    mine, noted = tmp_path / "step-00000001" / "mine.txt", tmp_path / "step-00000002" / "notes.txt"
    mine.parent.mkdir()
    mine.write_text("the user's")
    for step in (2, 3, 4):
        save(tmp_path, make(step), keep=1)
        if step == 2:
            noted.write_text("the user's")
    assert names(tmp_path) == ["latest", "step-00000001", "step-00000002", "step-00000004"]
    assert mine.read_text() == noted.read_text() == "the user's"
    assert load_checkpoint(tmp_path).values["step"] == 4


def test_an_older_step_saved_again_removes_the_future(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, make(step), keep=5)
    save(tmp_path, make(2, 9.0), keep=5, best_step=3)
    assert names(tmp_path) == ["latest", "step-00000001", "step-00000002"]
    result = load_checkpoint(tmp_path)
    assert result.model["w"][0, 0] == 9


def test_nothing_saved_yet_is_no_error(tmp_path, monkeypatch):
    assert load_checkpoint(absent := tmp_path / "absent") is None
    with monkeypatch.context() as patch:  # it was there as glob looked first
        patch.setattr(Path, "is_dir", lambda path: True)
        assert module.steps(absent) == []
    (tmp_path / ".step-00000004.tmp").mkdir()  # what a kill while saving the first one leaves
    assert load_checkpoint(tmp_path) is None


@pytest.mark.parametrize(
    "stage", ["as_bytes", "seal", "write_synced", "sync_folder", "write_atomically", "_prune"]
)
def test_a_crash_while_saving_leaves_a_whole_checkpoint(tmp_path, monkeypatch, stage):
    save(tmp_path, make(1, 1.0), keep=1)
    with monkeypatch.context() as patch:
        patch.setattr(module, stage, _crash)
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)  # a kill cleans nothing up
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, make(2, 2.0), keep=1)
    result = load_checkpoint(tmp_path)
    assert (result.values["step"], result.model["w"][0, 0]) in ((1, 1.0), (2, 2.0))
    save(tmp_path, make(2, 3.0), keep=1)
    assert names(tmp_path) == ["latest", "step-00000002"]


def _crash(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("room_bytes", [0, 100, 200, 300, 400, 600])
def test_a_full_disk_leaves_the_older_checkpoint_and_nothing_half_written(
    tmp_path, monkeypatch, room_bytes
):
    left = room_bytes

    class Disk(FileIO):
        def write(self, content):
            nonlocal left
            left -= len(content)
            if left < 0:
                raise OSError(28, "No space left on device")
            return super().write(content)

    save(tmp_path, make(1), keep=1)
    for place in (files, module):
        monkeypatch.setattr(place, "opened_to_write", lambda file, root: Disk(file, "wb"))
    refuses(OSError, "No space left", lambda: save(tmp_path, make(2), keep=1))
    assert names(tmp_path) == ["latest", "step-00000001"]


def cut(file):
    file.write_bytes(file.read_bytes()[:-1])


def flip(file):
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))


@pytest.mark.parametrize(
    "damage, text",
    [(cut, "bytes, not"), (flip, "is damaged: its SHA-256"), (Path.unlink, "is missing")],
)
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_damage_is_found_and_an_older_checkpoint_taken(tmp_path, name, damage, text):
    save(tmp_path, make(1), keep=3)
    newest = save(tmp_path, make(2), keep=3)
    damage(newest / name)
    result = load_checkpoint(tmp_path)
    assert (result.values["step"], result.folder.name) == (1, "step-00000001")
    assert len(result.notices) == 1
    assert str(newest / name) in result.notices[0]
    assert text in result.notices[0]


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"step": 1}', "[" * 10**5])
def test_a_damaged_state_is_found(tmp_path, content):
    folder = save(tmp_path, make(1), keep=3)
    (folder / "state.json").write_text(content)
    refuses(CheckpointError, r"state\.json: damaged or missing", read_checkpoint, folder)
    refuses(CheckpointError, "no checkpoint in .* is complete", load_checkpoint, tmp_path)


def test_a_changed_value_in_the_state_is_found_and_an_older_checkpoint_taken(tmp_path):
    save(tmp_path, make(1), keep=3)
    file = save(tmp_path, make(2), keep=3) / "state.json"
    file.write_text(file.read_text().replace('"epoch": 2', '"epoch": 3'))
    result = load_checkpoint(tmp_path)
    assert result.values["step"] == 1
    assert "state.json is damaged: its SHA-256" in result.notices[0]


def test_another_format_is_refused(tmp_path):
    folder = save(tmp_path, make(1), keep=3)
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(state | {"format": 2}))
    refuses(CheckpointError, "has a format other than 1", read_checkpoint, folder)


@pytest.mark.parametrize("latest", [None, "", "step-00000099\n", "../elsewhere\n"])
def test_without_a_usable_latest_the_newest_is_taken(tmp_path, latest):
    for step in (1, 2):
        save(tmp_path, make(step), keep=3)
    (tmp_path / "latest").unlink()
    if latest is not None:
        (tmp_path / "latest").write_text(latest)
    result = load_checkpoint(tmp_path)
    assert result.values["step"] == 2
