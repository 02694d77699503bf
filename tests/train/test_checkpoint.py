"""Checkpoints over ranks: any layout reads any other's, one rank's failure is everybody's, nothing
is read twice.
"""

import json
from dataclasses import replace
from pathlib import Path
from threading import Event

import numpy as np
import pytest

from nnmpi import Layout, Worker
from nnmpi.base.errors import CheckpointError
from nnmpi.base.files import sha256
from nnmpi.models import mlp
from nnmpi.optim import updates
from nnmpi.train import checkpoint as module
from nnmpi.train.checkpoint import (
    CheckpointWriter,
    RunState,
    Saver,
    TensorFile,
    find,
    read_checkpoint,
    restore,
    state_values,
)
from nnmpi.train.cli import main
from nnmpi.train.folder import RunFolder
from nnmpi.train.metrics import MetricsRecorder
from tests.equivalence.reference import batches, build
from tests.equivalence.rows import GPT
from tests.harness.refusals import told_on_all
from tests.harness.slow import MORE_LAYOUTS
from tests.parallel.test_model_state import equal


def shared(group, tmp_path):
    return Path(group.share(str(tmp_path)))


def make_worker(group, width=5, optimizer="adamw", seed=0):
    model = mlp((7,), 3, (width,), "relu", 0.0).initialize(seed=seed, dtype="float64")
    return Worker(model, updates.build(optimizer, model.storage, lr=0.1), group)


def arrays_of(worker):
    return {**worker.model.state(), **worker.state()[1].to_dict(everywhere=True)}


def save_state(saver, worker, step):
    saver.save(worker, step, state_values(worker, RunState(step=step, samples=9)))


def save_at(worker, folder, group, step):
    with MetricsRecorder(None) as recorder, Saver(folder.checkpoints, recorder, group) as saver:
        save_state(saver, worker, step)
        saver.wait()


def fill(worker, value):
    """Give all arrays values that differ from one another, and return them."""
    for arrays in (worker.model.storage.data, *worker.optimizer.slots().values()):
        for array in arrays:
            array[...] = value + np.arange(array.size)
            value += 1000
    worker.optimizer.steps = int(value)
    return arrays_of(worker)


GPT3 = replace(
    GPT, model_options={"features": 12, "heads": 3}, optimizer="adam", optimizer_options={}
)
STAGES = {"pipeline": "interleaved", "virtual_stages": 2}
LAYOUTS = (
    *(Layout(tp=4), Layout(pp=2, tp=2, **STAGES)),
    *(Layout(dp=2, pp=2, pipeline="v-half"), Layout(dp=2, pp=2, **STAGES)),
    *(Layout(dp=4, zero=stage, unit_bytes=1) for stage in (3, 1, 2)),
)


@pytest.mark.slow(MORE_LAYOUTS)
@pytest.mark.host_only("the device's double takes long; test_resume.py resumes there")
@pytest.mark.simulated(min_size=4, max_size=4)
def test_what_any_layout_has_saved_is_read_by_any_other_and_serially(group, tmp_path):
    """A trained GPT's weights and Adam's state, bit for bit: 3 heads over 4 ranks and over 2,
    stages dealt out, parts of ZeRO's units.
    """
    folder, alone = RunFolder(shared(group, tmp_path)), group.split(group.rank)

    def everything(worker):
        return [item.to_dict(everywhere=True) for item in worker.state()]

    for step, layout in enumerate(LAYOUTS, 1):
        writes = build(GPT3, group, layout)
        writes.step(next(batches(GPT3, writes)))
        save_at(writes, folder, group, step)
        expected = everything(writes)
        for other, ranks in ((LAYOUTS[step % len(LAYOUTS)], group), (Layout(), alone)):
            reads = build(GPT3, ranks, other, replays=False)
            restore(reads, find(folder, ranks), folder, RunState(samples=9))
            assert all(group.gather(all(map(equal, everything(reads), expected)))), (
                f"{layout} by {other}"
            )


@pytest.mark.simulated
@pytest.mark.parametrize(
    "options, text",
    [
        (
            {"width": 6},
            (
                r"model.safetensors has 1.weight with shape (7, 5) and float64, but this model"
                r" needs shape (7, 6)"
            ),
        ),
        ({"optimizer": "sgd"}, "the state of AdamW, which SGD would misread"),
    ],
)
def test_nothing_is_changed_by_a_checkpoint_that_does_not_fit(group, tmp_path, options, text):
    folder = RunFolder(shared(group, tmp_path))
    save_at(make_worker(group), folder, group, step=4)
    worker = make_worker(group, **options)
    before, saved = fill(worker, -9.0), find(folder, group)
    result = told_on_all(
        group, lambda: restore(worker, saved, folder, RunState(samples=9)), CheckpointError
    )
    assert text in result and str(folder.checkpoints / "step-00000004") in result
    assert all(group.gather(equal(arrays_of(worker), before)))


@pytest.mark.mpi
def test_a_disk_that_fills_up_halfway_is_told_on_all_ranks_and_leaves_the_older_ones(
    group, tmp_path, monkeypatch
):
    folder, worker = RunFolder(shared(group, tmp_path)), make_worker(group)
    left, real = [0], CheckpointWriter.write

    def full(self, name, array):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        real(self, name, array)

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "write", full)
        text = told_on_all(group, lambda: save_at(worker, folder, group, step=2), CheckpointError)
    assert text.endswith("(No space left on device); there is none yet")
    group.barrier()
    save_at(worker, folder, group, step=4)
    for room in range(6):  # in the model's file, then in the optimizer's
        left[0] = room
        with monkeypatch.context() as patch:
            patch.setattr(CheckpointWriter, "write", full)
            text = told_on_all(
                group, lambda: save_at(worker, folder, group, step=8), CheckpointError
            )
        assert (
            text
            == f"no checkpoint of step 8 can be written into {folder.checkpoints} (No space left on"
            " device); older ones are intact"
        )
        group.barrier()  # rank 0 tidies up last
        assert sorted(item.name for item in folder.checkpoints.iterdir()) == [
            "latest",
            "step-00000004",
        ]
        group.barrier()
    save_at(worker, folder, group, step=8)
    saved = find(folder, group)
    assert saved is not None and saved.values["step"] == 8


def test_a_checkpoint_has_the_values_of_its_moment_and_is_seen_when_it_is_on_the_disk(
    group, tmp_path, monkeypatch
):
    """Training goes on while the disk is slow; a run that ends with an error waits for it, too."""
    folder, worker, ready, real = RunFolder(tmp_path), make_worker(group), Event(), module.seal
    expected = {name: array.copy() for name, array in fill(worker, 1.0).items()}
    monkeypatch.setattr(module, "seal", lambda *file: ready.wait(60) and real(*file))

    def fall():
        with MetricsRecorder(None) as recorder, Saver(folder.checkpoints, recorder, group) as saver:
            save_state(saver, worker, 4)
            fill(worker, -9.0)
            assert not saver.is_affordable(1e9)
            assert [item.name for item in folder.checkpoints.iterdir()] == [".step-00000004.tmp"]
            ready.set()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fall()
    result = read_checkpoint(folder.checkpoints / "step-00000004")
    assert equal(
        {name: file[name] for file in (result.model, result.optimizer) for name in file.specs},
        expected,
    )


@pytest.mark.simulated
def test_what_the_disk_refuses_beside_training_is_told_on_all_ranks(group, tmp_path):
    folder, worker, full = RunFolder(shared(group, tmp_path)), make_worker(group), [True]

    class Recorder(MetricsRecorder):
        def sync(self):
            if full:
                raise OSError(28, "No space left on device")

    with Recorder(None) as recorder, Saver(folder.checkpoints, recorder, group) as saver:
        for step, ask in ((4, saver.wait), (5, lambda: save_state(saver, worker, 6))):
            save_state(saver, worker, step)
            assert f"no checkpoint of step {step} can be written" in told_on_all(
                group, ask, CheckpointError
            )
            group.barrier()
            assert not list(folder.checkpoints.iterdir())
            group.barrier()
        full.clear()
        save_state(saver, worker, 7)
        saver.wait()
        assert find(folder, group) is not None


@pytest.mark.simulated
def test_other_layouts_are_told(group, tmp_path):
    folder = RunFolder(shared(group, tmp_path))
    save_at(make_worker(group), folder, group, step=4)
    file = folder.checkpoints / "step-00000004" / module.STATE_FILE
    for layout, ranks, words in (
        ({"dp": 99, "pp": 1, "tp": 1}, 99, f"the run had 99 ranks and continues with {group.size}"),
        (
            {"dp": 2, "pp": 3, "tp": 1},
            6,
            f"the run had dp 2 x pp 3 x tp 1 and continues with dp {group.size} x pp 1 x tp 1",
        ),
    ):
        if group.is_root:
            state = json.loads(file.read_text()) | {"layout": layout, "ranks": ranks}
            del state["sha256"]
            file.write_text(json.dumps({**state, "sha256": module.digest(state)}))
        group.barrier()
        _, notices = restore(make_worker(group), find(folder, group), folder, RunState(samples=9))
        assert notices[1:] == [f"{words}: equal up to rounding"]


def test_a_resumed_run_reads_its_checkpoint_once(group, tmp_path, monkeypatch):
    out = tmp_path / "run"
    main(f"--model mlp --dataset iris --max-steps 2 --batch-size 50 --out {out}".split(), group)
    verified, read, real_get = [], [], TensorFile.__getitem__

    def count(file):
        verified.append(file.name) if file.parent.name == "step-00000002" else None
        return sha256(file)

    def get(self, name):
        read.append((self.file.name, name))
        return real_get(self, name)

    monkeypatch.setattr(module, "sha256", count)
    monkeypatch.setattr(TensorFile, "__getitem__", get)
    main(f"--resume {out} --max-steps 3".split(), group)
    assert sorted(verified) == ["model.safetensors", "optimizer.safetensors"]
    assert len(read) == len(set(read)) > 4
