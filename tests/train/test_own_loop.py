"""A checkpoint of a loop of one's own: it goes on to the bits of the one that nobody broke."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from nnmpi import DataParallel, Layout, ShardedDataParallel, arrange, resume, save, simulate
from nnmpi.base.errors import CheckpointError, UsageError
from nnmpi.data import Loader, load
from nnmpi.nn import BatchNorm, Dropout, Linear, ReLU, Sequential, Sharding
from nnmpi.ops import cross_entropy
from nnmpi.optim import Adam, AdamW, Muon, ReduceOnPlateau
from nnmpi.train.checkpoint import MODEL_FILE, OPTIMIZER_FILE, CheckpointWriter, steps
from tests.harness.refusals import refuses, usage_error


def make(group, seed):
    train, _ = load("iris")
    model = Sequential(Linear(4, 8), BatchNorm(8), ReLU(), Dropout(0.5), Linear(8, 3)).initialize(
        seed=seed
    )
    return model, Adam(model.storage, lr=0.02), Loader(train, 16, group)


UP_TO_2 = pytest.mark.simulated(max_size=2)


@UP_TO_2
def test_what_does_not_fit_is_refused(group, tmp_path):
    folder = group.share(str(tmp_path))
    model, optimizer, _ = make(group, 0)
    loop = (model, optimizer, group)
    usage_error(
        r"give Python's numbers and strings, such as int\(epoch\)",
        lambda: save(folder, loop, epoch=np.int64(3)),
    )
    for call in (save, resume):
        with pytest.raises(UsageError, match=r"\(model, optimizer, group\), not a Linear"):
            call(folder, Linear(2, 2))
        usage_error("not a int", call, folder, 3)
    refuses(
        CheckpointError,
        "no checkpoint of step . can be written into .*/not/there",
        save,
        f"{folder}/not/there",
        loop,
    )
    assert resume(folder, loop) == {}
    for optimizer.steps in (1, 2, 3):
        save(folder, loop, keep=2)
    assert group.share([item.name for item in steps(Path(folder))]) == [
        "step-00000003",
        "step-00000002",
    ]
    for keep in (0, -1):  # which would remove all, the new one included
        usage_error(
            f"keep is {keep}; give a whole number of at least 1", save, folder, loop, keep=keep
        )
    assert len(steps(Path(folder))) == 2
    other = Sequential(Linear(4, 3)).initialize()
    refuses(
        CheckpointError,
        "has 0.weight with shape",
        lambda: resume(folder, (other, Adam(other.storage), group)),
    )
    if group.is_root:  # as the train command does, with no place
        writer = CheckpointWriter(Path(folder), 4)
        writer.begin()
        writer.open(MODEL_FILE, {})
        writer.open(OPTIMIZER_FILE, {})
        writer.finish({}, 1)
    refuses(
        CheckpointError,
        "is from the train command; continue it with --resume",
        resume,
        folder,
        loop,
    )


@UP_TO_2
def test_a_run_that_did_not_resume_removes_nothing(group, tmp_path):
    """Whatever its steps are; one that has resumed goes on, in another folder, too."""
    folder = group.share(str(tmp_path))
    model, optimizer, _ = make(group, 0)
    for optimizer.steps in (10, 20):
        save(f"{folder}/old", (model, optimizer, group))
    kept = [item.name for item in steps(Path(folder, "old"))]
    other, fresh, _ = make(group, 1)
    for fresh.steps in (0, 20, 30):
        usage_error(
            "another run, which this one would replace",
            save,
            f"{folder}/old",
            (other, fresh, group),
        )
    assert [item.name for item in steps(Path(folder, "old"))] == kept
    resume(f"{folder}/old", (other, fresh, group))
    fresh.steps = 25
    for name in ("old", "new"):
        save(f"{folder}/{name}", (other, fresh, group))
    save(f"{folder}/own", (model, optimizer, group))
    usage_error("another run", lambda: save(f"{folder}/own", (*make(group, 2)[:2], group)))


@UP_TO_2
def test_a_damaged_checkpoint_is_not_passed_over_silently(group, tmp_path):
    folder = group.share(str(tmp_path))
    model, optimizer, _ = make(group, 0)
    for optimizer.steps in (1, 2):
        save(folder, (model, optimizer, group))
    if group.is_root:
        Path(folder, "step-00000002", MODEL_FILE).write_bytes(b"")
    group.barrier()
    other, fresh, _ = make(group, 1)
    with nullcontext() if group.rank else pytest.warns(match="an older .* is used instead"):
        resume(folder, (other, fresh, group))
    assert fresh.steps == 1


@UP_TO_2
def test_state_of_another_optimizer_is_refused(group, tmp_path):
    """Adam's is that of AdamW and Muon by its names and shapes, and means something else."""
    folder = group.share(str(tmp_path / "adam"))
    model, adam, _ = make(group, 0)
    save(folder, (model, adam, group))
    for kind in (AdamW, Muon):
        with pytest.raises(CheckpointError, match=f"Adam, which {kind.__name__} would misread"):
            resume(folder, (model, kind(model.storage), group))


@UP_TO_2
def test_the_rate_and_the_losses_behind_it_are_restored(group, tmp_path):
    folder = group.share(str(tmp_path / "checkpoints"))

    def run(first, stop, objects=True):
        model, optimizer, _ = make(group, 0)
        plateau = ReduceOnPlateau(0.1, patience=1)
        loop, rates = (model, optimizer, group), []
        if first:
            resume(folder, loop, plateau=plateau)
        for _ in range(first, stop):
            optimizer.steps += 1
            rates.append(optimizer.lr)
            optimizer.lr = plateau(-1.0)
        save(folder, loop, **({"plateau": plateau} if objects else {}))
        return rates

    usage_error("plateau=plateau", run, 0, 1, objects=False)
    first, second = run(0, 4), run(4, 9)
    folder = group.share(str(tmp_path / "whole"))
    assert run(0, 9) == first + second
    model, optimizer, _ = make(group, 0)
    refuses(
        CheckpointError,
        "saved with plateau besides .* resume got nothing",
        resume,
        folder,
        (model, optimizer, group),
    )
    assert optimizer.steps == 0


LAYOUTS = Layout(), Layout(tp=2), Layout(zero=3, unit_bytes=1)


@pytest.mark.parametrize("after", LAYOUTS)
@pytest.mark.parametrize("before", LAYOUTS)
def test_a_loop_by_hand_goes_on_in_another_layout(tmp_path, before, after):
    x, y = np.random.default_rng(0).standard_normal((4, 4)), np.arange(4) % 3

    def run(group, layout, seed, stop=4):
        built = Sequential(Linear(4, 8), ReLU(), Linear(8, 3))
        built.sharding = {"0": Sharding.COLUMN, "2": Sharding.ROW}
        where = arrange(built, group, layout, sample=x, dtype="float64")
        model = where.model.initialize(seed=seed, dtype="float64", storage=where.storage)
        ranks, losses = where.mesh.replicas, []
        strategy = (
            ShardedDataParallel(model, ranks, algorithm="ring")
            if layout.zero == 3
            else DataParallel(model, ranks)
        )
        optimizer = Adam(model.storage, lr=0.02)
        if layout.tp == 2:
            usage_error(
                r"give what nnmpi.arrange returned", save, tmp_path, (model, optimizer, group)
            )
        resume(tmp_path, (model, optimizer, where))
        while optimizer.steps < stop:
            rows = slice(ranks.rank, None, ranks.size)
            loss = cross_entropy(model(x[rows]), y[rows], reduction="sum")
            model.zero_grad()
            strategy.backward(loss, 4)
            optimizer.step()
            losses += ranks.sum_floats([loss.item()])
        if group.size > 1:
            save(tmp_path, (model, optimizer, where))
        return losses

    ((*expected,),) = simulate(partial(run, layout=Layout(), seed=0), 1)
    first = simulate(partial(run, layout=before, seed=0, stop=2), 2)
    second = simulate(partial(run, layout=after, seed=1), 2)
    for begin, end in zip(first, second, strict=True):
        np.testing.assert_allclose([*begin, *end], expected, rtol=1e-11)
