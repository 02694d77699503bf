"""What must be the same on every rank: options, errors, and the step at which a signal stops the run."""

import os
import signal
from pathlib import Path

import pytest

from nnmpi.comm.group import Group
from nnmpi.errors import LayoutError, UsageError
from nnmpi.train.cli import main, read_options
from nnmpi.train.log import Console
from nnmpi.train.loop import StopSignals
from nnmpi.train.metrics import read_metrics

pytestmark = pytest.mark.mpi


def shared(group: Group, tmp_path: Path) -> Path:
    return Path(group.share(str(tmp_path)))


def test_every_rank_gets_the_options_that_rank_0_read(group: Group) -> None:
    words = "--lr 0.5 --hidden 3 4 --model mlp --out a" if group.is_root else "--epochs 99"
    config = read_options(words.split(), group, Console(quiet=True))
    assert config is not None
    assert (config.optimization.lr, config.optimization.epochs, config.model.hidden) == (0.5, 20, (3, 4))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--lr -1", "--lr is -1.0; give a finite number above 0"),
        (
            "--resume absent",
            "--resume absent: there is no run (absent/config.json is missing); give the folder of a run",
        ),
        ("--dataset irs --out a", "--dataset irs: data set 'irs' is unknown"),
        ("--dataset iris --out a", "model cnn needs images"),
    ],
)
def test_wrong_options_are_the_same_error_on_every_rank(group: Group, words: str, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        main(words.split(), group)
    assert str(caught.value).startswith(text)
    assert len(set(group.gather(str(caught.value)))) == 1


def test_a_layout_that_does_not_fit_the_world_is_refused(group: Group) -> None:
    with pytest.raises(
        LayoutError, match=f"not dp {group.size + 1} x pp 1 x tp 1 = {group.size + 1}; these fit: dp {group.size} "
    ):
        main(["--dp", str(group.size + 1)], group)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_on_one_rank_stops_all_at_the_same_step(group: Group, number: signal.Signals) -> None:
    with StopSignals(group, interval_s=0.01) as stop:
        for step in range(1000):
            if step == 5 and group.rank == group.size - 1:
                os.kill(os.getpid(), number)
            if (found := stop.asked(step_s=0.001)) != 0:
                break
    assert found == number
    assert len(set(group.gather(step))) == 1
    assert 5 <= step <= 5 + 20
    assert signal.getsignal(number) not in (stop._note,)


def test_a_second_interrupt_does_not_wait(group: Group) -> None:
    with pytest.raises(KeyboardInterrupt), StopSignals(group):  # noqa: PT012
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)


def test_only_rank_0_writes_and_prints(group: Group, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = shared(group, tmp_path) / "run"
    main(f"--model mlp --dataset iris --epochs 2 --batch-size 50 --check-weights --out {out}".split(), group)
    group.barrier()  # rank 0 still writes when the others are done
    assert ("test accuracy" in capsys.readouterr().out) == group.is_root
    assert [each["global_step"] for each in read_metrics(out / "metrics.jsonl")] == [3, 6, 6, 6]
