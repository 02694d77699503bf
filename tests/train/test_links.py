"""A run's folder may come from somebody else: no link in it leads what is written elsewhere."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import nnmpi
from nnmpi.base import files
from nnmpi.base.errors import UsageError
from nnmpi.commands import evaluate, export
from nnmpi.data.tokenizer import ByteTokenizer
from nnmpi.lab import doctor, report
from nnmpi.models.pretrained import GPTSize, save_pretrained
from nnmpi.models.torch_weights import save_arrays
from nnmpi.train.checkpoint import CheckpointWriter
from nnmpi.train.cli import main as train
from nnmpi.train.folder import RunFolder
from tests.harness.commands import on_ranks

GPT = GPTSize(9, 8, 4, 1, 2)
OPTIONS = "--model gpt --features 8 --heads 2 --layers 1 --context 8 --max-steps 2 --quiet --trace"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Return the folder of a finished run with every file that a run has."""
    place = tmp_path_factory.mktemp("links")
    (place / "text.txt").write_text("the quick brown fox\n" * 20)
    run = place / "run"
    words = f"--dataset {place}/text.txt {OPTIONS} --keep-best --out {run}".split()
    on_ranks(train, words)
    on_ranks(evaluate.main, [str(run)])
    report.main([str(run)])
    on_ranks(export.main, [str(run)])
    return run


ACTS = {
    "resume": lambda run: on_ranks(train, ["--resume", str(run), "--max-steps", "4"]),
    "evaluate": lambda run: on_ranks(evaluate.main, [str(run)]),
    "export": lambda run: on_ranks(export.main, [str(run)]),
    "report": lambda run: report.main([str(run)]),
    "doctor": lambda run: doctor.main([str(run)]),
    "load": nnmpi.load,
}
WRITTEN_LATER = ("flight", "faults.jsonl", "flight/rank-0.txt", "checkpoints/step-00000009")


@pytest.mark.parametrize("act", ACTS)
def test_a_run_with_a_link_is_refused_and_nothing_is_changed(base, tmp_path, act):
    """Every file and folder of a run, also those of a stall and of a supervisor."""
    names = sorted(f"{path.relative_to(base)}" for path in base.rglob("*"))
    assert len(names) > 20
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for name in (*names, *WRITTEN_LATER):
        run = tmp_path / "run"
        shutil.copytree(base, run)
        entry = run / name
        entry.parent.mkdir(exist_ok=True)
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink(missing_ok=True)
        entry.symlink_to(precious)
        with pytest.raises(
            UsageError, match="is (missing|a link)|cannot be read|not known as a file of nnmpi"
        ):
            ACTS[act](run)
        assert precious.read_text() == "mine"
        shutil.rmtree(run)


def test_a_new_run_begins_in_no_folder_with_a_link(tmp_path):
    (tmp_path / "flight").symlink_to("/tmp")
    with pytest.raises(UsageError, match="flight is a link"):
        RunFolder(tmp_path).check_free()


def test_a_folder_that_vanishes_meanwhile_is_no_link(tmp_path, monkeypatch):
    """The job before is still removing a checkpoint."""
    checkpoint = tmp_path / "checkpoints" / "step-5"
    checkpoint.mkdir(parents=True)
    scandir = os.scandir

    def look(path):
        if Path(path) == checkpoint:
            checkpoint.rmdir()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", look)
    RunFolder(tmp_path).check_links()
    assert not checkpoint.exists()


def write_checkpoint(run):
    CheckpointWriter(run / "checkpoints", 1, run).begin()


WRITERS = {
    "checkpoints": write_checkpoint,
    "checkpoints/.step-00000001.tmp": lambda run: files.write_synced(
        run / "checkpoints" / ".step-00000001.tmp" / "state.json", b"x", run
    ),
    "model": lambda run: save_pretrained(run / "model", GPT.build().initialize().state(), GPT),
    "tokenizer": lambda run: ByteTokenizer().save(run / "tokenizer"),
    "flight": lambda run: files.make_folder(run / "flight", run),
    "metrics.jsonl": lambda run: files.opened_to_write(run / "metrics.jsonl", "ab", root=run),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_link_that_appears_while_a_run_goes_on_is_not_followed(tmp_path, name):
    """What is checked at the start may have changed since."""
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    (run / "checkpoints").mkdir(parents=True)
    elsewhere.mkdir()
    (elsewhere / "metrics.jsonl").touch()
    if name == "checkpoints":
        (run / name).rmdir()
    (run / name).symlink_to(elsewhere / "metrics.jsonl" if name == "metrics.jsonl" else elsewhere)
    with pytest.raises(OSError, match=r"is a link or a file|symbolic links|File exists"):
        WRITERS[name](run)
    assert [*elsewhere.iterdir()] == [elsewhere / "metrics.jsonl"]


def test_removing_removes_the_link_alone(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "link").symlink_to("kept")
    files.remove_folder(tmp_path / "link", tmp_path)
    assert [*tmp_path.iterdir()] == [tmp_path / "kept"]


def test_the_folder_that_the_user_names_may_be_a_link(base, tmp_path):
    """As runs/latest is."""
    os.symlink(base, tmp_path / "latest")
    assert nnmpi.load(tmp_path / "latest").step == 2


def test_a_file_is_replaced_and_what_a_link_there_leads_to_stays(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "torch.safetensors").symlink_to("precious")
    save_arrays(tmp_path / "torch.safetensors", {"x": np.zeros(2)})
    assert (tmp_path / "precious").read_text() == "mine"
    assert not (tmp_path / "torch.safetensors").is_symlink()
