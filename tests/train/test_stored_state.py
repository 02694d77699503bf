"""What is wrong with a run's checkpoints is found before the run goes on: no work is done that
cannot be kept.
"""

import json
import os
import shutil

import pytest

import nnmpi
from nnmpi import NnmpiError
from nnmpi.base.errors import CheckpointError
from nnmpi.base.files import read_json, sha256, write_json
from nnmpi.commands.evaluate import main as evaluate
from nnmpi.commands.export import main as export
from nnmpi.train.checkpoint import check_folder, digest, find, load_checkpoint, read_checkpoint
from nnmpi.train.cli import main
from nnmpi.train.folder import RunFolder
from tests.harness.refusals import refuses


@pytest.fixture
def run(tmp_path, group):
    """A run of two steps with its checkpoint."""
    out = tmp_path / "run"
    main(
        f"--model mlp --hidden 3 --dataset iris --max-steps 2 --batch-size 50 --out {out}".split(),
        group,
    )
    return out


def rewrite(run, **changes):
    """Change values of state.json, and let its checksum be right."""
    file = run / "checkpoints" / "step-00000002" / "state.json"
    state = json.loads(file.read_text()) | changes
    del state["sha256"]
    file.write_text(json.dumps({**state, "sha256": digest(state)}))


def into_file(checkpoints):
    checkpoints.rename(checkpoints.with_name("away"))
    checkpoints.write_text("")


def into_link(checkpoints):
    checkpoints.rename(checkpoints.with_name("away"))
    checkpoints.symlink_to("nowhere")


@pytest.mark.parametrize(
    "damage, words",
    [
        (
            into_file,
            "checkpoints is not a folder; put the run's checkpoints there, or move it away",
        ),
        (into_link, "checkpoints is a link, which may lead out of the run's folder; put"),
    ],
)
def test_a_place_that_takes_no_checkpoint_is_found_before_any_work(
    run, group, monkeypatch, damage, words
):
    damage(run / "checkpoints")
    before = (run / "metrics.jsonl").read_bytes(), (run / "config.json").read_bytes()
    monkeypatch.setattr("nnmpi.train.session.set_up", lambda *_: pytest.fail("the run has begun"))
    refuses(NnmpiError, words, lambda: main(f"--resume {run} --max-steps 4".split(), group))
    assert before == ((run / "metrics.jsonl").read_bytes(), (run / "config.json").read_bytes())


def test_checkpoints_that_may_not_be_read_are_not_taken_for_none(run, group, monkeypatch):
    folder = RunFolder(run)
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        refuses(
            CheckpointError,
            f"{folder.checkpoints} cannot be used; let this user",
            find,
            folder,
            group,
        )
    assert find(folder, group) is not None


def test_a_folder_that_is_not_there_yet_is_fine(tmp_path):
    check_folder(tmp_path / "checkpoints")


@pytest.mark.parametrize(
    "values, sentence",
    [
        ({"window": {"stops": 1}}, r"state\.json: not what a run writes \("),
        ({"layout": {"dp": []}}, r"state\.json: not what a run writes \("),
        ({"optimizer": {"steps": []}}, r"state\.json: not what a run writes \('list'"),
        ({"cuts": 1.5}, r"state\.json: not what a run writes \("),
        ({"batch": 10**400}, "is after batch 1000"),
    ],
)
def test_a_state_without_what_a_run_writes_is_refused_before_any_work(run, group, values, sentence):
    rewrite(run, **values)
    refuses(CheckpointError, sentence, lambda: main(f"--resume {run} --max-steps 4".split(), group))


@pytest.mark.parametrize("files", [3, {"model.safetensors": 3}, {"model.safetensors": {}}])
def test_a_state_that_does_not_tell_of_its_files_is_damaged(run, files):
    rewrite(run, files=files)
    refuses(
        CheckpointError,
        r"state\.json lacks the sizes and checksums of its files",
        lambda: read_checkpoint(run / "checkpoints" / "step-00000002"),
    )


def test_a_file_that_cannot_be_read_is_as_good_as_damaged(run, monkeypatch, group):
    main(f"--resume {run} --max-steps 4".split(), group)
    newest = run / "checkpoints" / "step-00000004"

    def refuse(file):
        if file.parent == newest:
            raise PermissionError(13, "Permission denied")
        return sha256(file)

    monkeypatch.setattr("nnmpi.train.checkpoint.sha256", refuse)
    result = load_checkpoint(run / "checkpoints")
    assert result is not None and result.folder.name == "step-00000003"
    assert list(result.notices) == [
        f"{newest} cannot be read (Permission denied); an older checkpoint is used instead,"
        " step-00000003"
    ]


OLDER = "; an older checkpoint is used instead, step-00000003"
OTHER = r"has other weights than the run had at its end, says .*finished.json"


def cut(newest):
    file = newest / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])


def flip(newest):
    file = newest / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")


def exchange(newest):
    """Let other weights be right by themselves."""
    shutil.copytree(newest.with_name("step-00000003"), newest, dirs_exist_ok=True)


@pytest.mark.parametrize("use", ["load", "evaluate", "export", "resume"])
@pytest.mark.parametrize(
    "damage, words",
    [
        (cut, rf"step-00000004/model.safetensors has \d+ bytes, not \d+{OLDER}"),
        (flip, f"optimizer.safetensors is damaged: .*{OLDER}"),
        (
            lambda newest: (newest / "state.json").unlink(),
            f"state.json: damaged or missing.*{OLDER}",
        ),
        (shutil.rmtree, "latest names a checkpoint that is not here; the newest one is used"),
        (lambda newest: newest.with_name("latest").write_text("step-00000003"), OTHER),
        (exchange, OTHER),
        (lambda newest: (newest.parents[1] / "finished.json").write_text("{"), "json is damaged"),
    ],
)
def test_weights_other_than_the_last_ones_are_never_used_silently(run, group, damage, words, use):
    main(f"--resume {run} --max-steps 4".split(), group)
    damage(run / "checkpoints" / "step-00000004")
    uses = {
        "load": lambda: nnmpi.load(run),
        "evaluate": lambda: evaluate([str(run)], group),
        "export": lambda: export([str(run)], group),
        "resume": lambda: main(f"--resume {run} --max-steps 5 --quiet".split(), group),
    }
    with pytest.warns(UserWarning, match=words.replace("\\\\", "\\")):
        uses[use]()


def test_the_last_weights_are_used_without_a_word(run, group):
    main(f"--resume {run} --max-steps 4".split(), group)
    assert nnmpi.load(run).step == 4
    (run / "checkpoints" / "latest").unlink()  # it is written last, and a kill may come before
    assert nnmpi.load(run).step == 4


def test_options_of_a_far_larger_model_take_no_memory(run, group, monkeypatch):
    """A foreign run's options need not fit its weights; found out before any array is made."""
    values = read_json(run / "config.json")
    write_json(run / "config.json", values | {"hidden": [10**5, 10**5]})
    refuse = lambda *_, **__: pytest.fail("the model takes memory")  # noqa: E731
    monkeypatch.setattr("nnmpi.nn.module.Module.initialize", refuse)
    for act in (lambda: main(["--resume", str(run)], group), lambda: nnmpi.load(run)):
        refuses(CheckpointError, r"with shape .*, but this model needs shape", act)
