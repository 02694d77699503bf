"""What is wrong with a run's checkpoints is found before the run goes on: no work is done that cannot be kept."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nnmpi.comm.group import Group
from nnmpi.errors import CheckpointError
from nnmpi.files import sha256
from nnmpi.train.checkpoint import find
from nnmpi.train.checkpoint_files import check_folder, digest, load_checkpoint, read_checkpoint
from nnmpi.train.cli import main
from nnmpi.train.folder import RunFolder
from nnmpi.train.run_state import RunState, check_stored
from tests.data.locked import lock

FILE = Path("run/state.json")
GOOD = {
    **RunState(samples=9).to_json(),
    "ranks": 2,
    "layout": {"dp": 2, "pp": 1, "tp": 1},
    "optimizer": {"steps": 4},
    "algorithms": {"p0 t0": ["ring"]},
    "cuts": [2, 1],
}


def test_what_runs_write_is_accepted() -> None:
    check_stored(GOOD, FILE)
    check_stored({**GOOD, "algorithms": {}, "cuts": [], "later": 1}, FILE)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("step", "7", "has step '7', not a whole number from 0 on"),
        ("epoch", True, "has epoch True, not a whole number from 0 on"),
        ("batch", -1, "has batch -1, not"),
        ("best_step", 1.5, "has best_step 1.5, not"),
        ("samples", None, "has samples None, not"),
        ("elapsed_s", "long", "has elapsed_s 'long', not a number"),
        ("best", float("nan"), "has best nan, not a number"),
        ("elapsed_s", 10**400, "has elapsed_s 1000"),
        ("window", 3, "has window 3, not sums by name"),
        ("window", {"steps": "x"}, "has window {'steps': 'x'}, not sums by name"),
        ("in_epoch", {"stops": 1}, "has in_epoch {'stops': 1}, not sums by name"),
        ("optimizer", {"steps": "abc"}, """has optimizer {'steps': 'abc'}, not numbers by name with "steps";"""),
        ("optimizer", {}, "has optimizer {}, not"),
        ("optimizer", [], "has optimizer [], not"),
        ("ranks", 0, "has ranks 0, not a whole number from 1 on"),
        ("layout", {"dp": 2, "pp": 1}, "has layout {'dp': 2, 'pp': 1}, not whole numbers from 1 on for dp, "),
        ("layout", {"dp": 2, "pp": 1, "tp": 0}, "has layout {'dp': 2, 'pp': 1, 'tp': 0}, not whole numbers"),
        ("layout", 2, "has layout 2, not whole numbers"),
        ("algorithms", "ring", "has algorithms 'ring', not lists of names of all-reduces by part of the model"),
        ("algorithms", ["ring"], "not lists of names of all-reduces"),
        ("window", {"steps": 3}, "has window {'steps': 3}, not sums by name"),
        ("algorithms", {"p0 t0": [3]}, "not lists of names of all-reduces"),
        ("cuts", 3, "has cuts 3, not whole numbers from 0 on"),
    ],
)
def test_a_value_of_another_kind_is_named(name: str, value: Any, words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        check_stored({**GOOD, name: value}, FILE)
    assert str(caught.value).startswith("run/state.json has ")
    assert words in str(caught.value)
    assert str(caught.value).endswith("; remove the folder with that file to go on from an older checkpoint")


@pytest.mark.parametrize("name", sorted(GOOD.keys() - {"data"}))
def test_a_value_that_is_missing_is_named(name: str) -> None:
    values = {key: value for key, value in GOOD.items() if key != name}
    with pytest.raises(CheckpointError, match=rf"^run/state\.json lacks {name}, "):
        check_stored(values, FILE)


@pytest.fixture
def run(tmp_path: Path, group: Group) -> Path:
    """A run of two steps with its checkpoint."""
    out = tmp_path / "run"
    main(f"--model mlp --hidden 3 --dataset iris --max-steps 2 --batch-size 50 --out {out}".split(), group)
    return out


def rewrite(run: Path, **changes: Any) -> None:
    """Change values of state.json, and let its checksum be right."""
    file = run / "checkpoints" / "step-00000002" / "state.json"
    state = json.loads(file.read_text()) | changes
    del state["sha256"]
    file.write_text(json.dumps({**state, "sha256": digest(state)}))


def into_file(checkpoints: Path) -> None:
    checkpoints.rename(checkpoints.with_name("away"))
    checkpoints.write_text("")


def into_link(checkpoints: Path) -> None:
    checkpoints.rename(checkpoints.with_name("away"))
    checkpoints.symlink_to("nowhere")


def latest_into_folder(checkpoints: Path) -> None:
    (checkpoints / "latest").unlink()
    (checkpoints / "latest").mkdir()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (into_file, "checkpoints is not a folder; put the run's checkpoints there, or move it away"),
        (into_link, "checkpoints is not a folder; put"),
        (latest_into_folder, "checkpoints/latest is a folder and not a file with a name; remove it to go on"),
    ],
)
def test_a_place_that_takes_no_checkpoint_is_found_before_any_work(
    run: Path, group: Group, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None], words: str
) -> None:
    damage(run / "checkpoints")
    before = (run / "metrics.jsonl").read_bytes(), (run / "config.json").read_bytes()
    monkeypatch.setattr("nnmpi.train.session.set_up", lambda *_: pytest.fail("the run has begun"))
    with pytest.raises(CheckpointError, match=words):
        main(f"--resume {run} --max-steps 4".split(), group)
    assert before == ((run / "metrics.jsonl").read_bytes(), (run / "config.json").read_bytes())


def test_checkpoints_that_may_not_be_read_are_not_taken_for_none(
    run: Path, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(run)
    sentence = rf"{folder.checkpoints} cannot be used \({{}}\); let this user read and write it, or copy the run"

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refuse)
        with pytest.raises(CheckpointError, match=sentence.format("Permission denied")):
            find(folder, group)
    with monkeypatch.context() as patch:
        lock(folder.checkpoints, patch)
        with pytest.raises(CheckpointError, match=sentence.format("Permission denied")):
            find(folder, group)
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        with pytest.raises(CheckpointError, match=sentence.format("it may not be written")):
            find(folder, group)
    assert find(folder, group) is not None


def test_a_folder_that_is_not_there_yet_is_fine(tmp_path: Path) -> None:
    check_folder(tmp_path / "checkpoints")


@pytest.mark.parametrize("changes", [{"optimizer": {"steps": "abc"}}, {"epoch": "x"}, {"layout": [1]}])
def test_a_state_with_values_of_other_kinds_is_one_sentence(run: Path, group: Group, changes: dict[str, Any]) -> None:
    rewrite(run, **changes)
    name = next(iter(changes))
    with pytest.raises(CheckpointError, match=rf"step-00000002/state\.json has {name} .*, not .*; remove the folder"):
        main(f"--resume {run} --max-steps 4".split(), group)


@pytest.mark.parametrize("files", [3, {"model.safetensors": 3}, {"model.safetensors": {}}])
def test_a_state_that_does_not_tell_of_its_files_is_damaged(run: Path, files: Any) -> None:
    rewrite(run, files=files)
    with pytest.raises(CheckpointError, match=r"state\.json does not say the sizes and sums of its files"):
        read_checkpoint(run / "checkpoints" / "step-00000002")


def test_a_file_that_cannot_be_read_is_as_good_as_damaged(
    run: Path, monkeypatch: pytest.MonkeyPatch, group: Group
) -> None:
    main(f"--resume {run} --max-steps 4".split(), group)
    newest = run / "checkpoints" / "step-00000004"

    def refuse(file: Path) -> str:
        if file.parent == newest:
            raise PermissionError(13, "Permission denied")
        return sha256(file)

    monkeypatch.setattr("nnmpi.train.checkpoint_files.sha256", refuse)
    found = load_checkpoint(run / "checkpoints")
    assert found is not None and found[1].name == "step-00000003"
    assert found[2] == [f"{newest} cannot be read (Permission denied); an older checkpoint is used instead"]
