"""What must be the same on every rank: options, errors, and the step at which a signal stops the
run.
"""

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from nnmpi.base.errors import CommError, LayoutError, UsageError
from nnmpi.comm.synchrony.slow import Slow
from nnmpi.data import Loader, load
from nnmpi.models import mlp
from nnmpi.train.cli import main, read_options
from nnmpi.train.loop import StopSignals
from nnmpi.train.metrics import read_metrics
from tests.harness.refusals import refuses
from tests.worker_options import work

pytestmark = pytest.mark.mpi


def shared(group, tmp_path):
    return Path(group.share(str(tmp_path)))


def test_every_rank_gets_the_options_that_rank_0_read(group):
    words = "--lr 0.5 --hidden 3 4 --model mlp --out a" if group.is_root else "--epochs 99"
    config = read_options(words.split(), group)
    assert (config.optimization.lr, config.optimization.epochs, config.model.hidden) == (
        0.5,
        20,
        (3, 4),
    )


@pytest.mark.parametrize(
    "words, text",
    [
        ("--lr -1", "--lr is -1.0; give a finite number above 0"),
        (
            "--resume absent",
            (
                "--resume absent: there is no run (absent/config.json is missing); give the folder"
                " of a run"
            ),
        ),
        ("--dataset irs --out a", "--dataset irs: data set 'irs' is unknown"),
        ("--dataset iris --out a", "model cnn needs images"),
    ],
)
def test_wrong_options_are_the_same_error_on_every_rank(group, words, text):
    with pytest.raises(UsageError) as caught:
        main(words.split(), group)
    assert str(caught.value).startswith(text)
    assert len(set(group.gather(str(caught.value)))) == 1


def test_a_layout_that_does_not_fit_the_world_is_refused(group):
    refuses(
        LayoutError,
        f"not dp {group.size + 1} x pp 1 x tp 1 = {group.size + 1}; these fit: dp {group.size} ",
        lambda: main(["--dp", str(group.size + 1)], group),
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_on_one_rank_stops_all_at_the_same_step(group, number):
    """Ranks in step ask one another about every tenth of a second; for those out of step see
    compose.
    """
    model = mlp((4,), 3, (5,)).initialize()
    worker = work(model, group, slow=Slow(minimum_s=0.01))
    loader = Loader(load("iris")[0], 1, group)
    done = []

    def note(item):
        done.append(item.batch)
        if item.batch == 5 and group.rank == group.size - 1:
            os.kill(os.getpid(), number)

    with StopSignals() as stop:
        report = worker.run(
            loader, 0, 0, 120, 0, lambda step: 0.1, progress=note, poll_signal=stop.noted
        )
    assert report.signal == number
    assert group.gather(report.batches) == [len(done)] * group.size
    assert 5 < len(done) < 120
    assert signal.getsignal(number) not in (stop._note,)
    worker.release()


def test_a_second_interrupt_does_not_wait(group):
    with pytest.raises(KeyboardInterrupt), StopSignals():  # noqa: PT012
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)


def test_only_rank_0_writes_and_prints(group, tmp_path, capsys):
    out = shared(group, tmp_path) / "run"
    main(f"--model mlp --dataset iris --epochs 2 --batch-size 50 --out {out}".split(), group)
    group.barrier()  # rank 0 still writes when the others are done
    assert ("test accuracy" in capsys.readouterr().out) == group.is_root
    assert [item["global_step"] for item in read_metrics(out / "metrics.jsonl")] == [3, 6, 6, 6]


@pytest.mark.parametrize(
    "rows, text",
    [
        (
            40,
            (
                "--dataset d.npz is not the same on all ranks: .*; {last} has [0-9a-f]+ [0-9a-f]+;"
                " give all nodes the same"
            ),
        ),
        (
            30,
            (
                "--dataset d.npz is not the same on all ranks: .* 32 training and 8 test samples;"
                " {last} has 24 training"
            ),
        ),
    ],
)
def test_ranks_with_other_data_are_named(group, tmp_path, monkeypatch, rows, text):
    """Of the same shape, or with fewer rows: both were trained on, the one in silence."""
    if group.size == 1:
        return
    is_other = group.rank == group.size - 1
    monkeypatch.chdir(tmp_path)
    x = np.arange(160, dtype=np.float32).reshape(40, 4) / 160
    x[3, 2] += is_other
    count = rows if is_other else 40
    np.savez("d.npz", x=x[:count], y=np.arange(count) % 3)
    refuses(
        CommError,
        text.format(last=f"rank {group.size - 1}", size=group.size),
        main,
        ["--model", "mlp", "--dataset", "d.npz"],
        group,
    )


def test_ranks_with_another_model_file_are_named(group, tmp_path, monkeypatch):
    if group.size == 1:
        return
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(f"# {group.rank}\ndef net(shape, classes): return None\n")
    refuses(
        CommError,
        "the program's files differ: rank 0 has [0-9a-f]+; rank 1 has",
        main,
        ["--model", "mine.py:net", "--dataset", "iris"],
        group,
    )
