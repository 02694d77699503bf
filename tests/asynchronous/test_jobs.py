"""Jobs whose ranks are not in step: they learn, tell how stale they were, and end well however they
end.
"""

import gzip
import json
import re
import signal

import pytest

from nnmpi.train.cli import main
from nnmpi.train.metrics import read_metrics, sum_staleness
from tests.chrome import breaches
from tests.harness.commands import on_ranks
from tests.harness.slow import ONCE_MORE
from tests.train.jobs import lines, once, send, train, unfolded

# Several jobs one after the other, on a machine that may be busy with others.
pytestmark = pytest.mark.timeout(300)

DIGITS = "--model mlp --hidden 32 --dataset digits --lr-schedule constant"
FOR_EVER = (
    f"{DIGITS} --epochs 100000 --no-jit --eval-every 0 --save-every 0 --log-every 5 --slow ms=1"
)


def check_told(run, output, first_epoch):
    """Check that the line below each epoch says what the records of its segments say.

    It is not printed again if it would say the same as below the epoch before.

    Args:
        first_epoch: the number of the first epoch of this job, which may have begun in another one.
    """
    records = [
        record for record in read_metrics(run / "metrics.jsonl") if record["kind"] == "staleness"
    ]
    whole = output.replace("\n    ", " ")  # lines that are broken go on four columns to the right
    epochs = re.findall(r"epoch (\d+)/\d+: .*\n((?:  [^ ].*\n)*)", whole)
    assert epochs
    told = ""
    for number, text in epochs:
        printed = re.findall(r"^  ((?:staleness|weights differed) .*)", text, re.MULTILINE)
        told = printed[0] if printed else told
        if int(number) <= first_epoch:
            continue
        mine = [record for record in records if int(number) - 1 < record["epoch"] <= int(number)]
        if measured := what_was_measured(mine):
            for begin, part in zip(measured, told.split("; "), strict=True):
                assert part.startswith(begin), (number, told)
        else:
            assert not printed, (number, told)


def what_was_measured(records):
    """Return how the parts of the line on these segments begin."""
    stale, parts = sum_staleness(records), []
    lead = max(record["lead"] for record in records)
    apart = max(record["disagreement"] for record in records)
    if stale.total:
        parts.append(f"staleness {stale.mean():.2f} on average, at most {stale.largest()}")
    if lead:
        parts.append(f"at most {lead} step")
    if stale.total:
        counts = ", ".join(str(histogram.total()) for histogram in stale.histograms)
        parts.append(f"steps by worker: {counts}")
    if apart:
        parts.append(f"weights differed by {100 * apart:.2g} %")
    return parts


def test_what_was_measured_is_told_below_an_epoch_unless_it_stays_the_same(tmp_path, capsys):
    run = tmp_path / "run"
    words = f"{DIGITS} --epochs 3 --sync local --local-steps 1 --eval-every 0 --out {run}"
    on_ranks(main, words.split(), 2)
    output = capsys.readouterr().out
    assert output.count("steps by worker") == 1
    check_told(run, output, 0)


@pytest.mark.slow(ONCE_MORE)
def test_a_killed_run_goes_on_in_every_mode_and_on_other_ranks(tmp_path):
    run = tmp_path / "run"
    words = f"{DIGITS} --sync asp --save-every 20steps --log-every 5 --out {run}"
    kill = once(
        lambda: lines(run / "metrics.jsonl") > 14,
        lambda: send(signal.SIGKILL, str(run), to="ranks"),
        ends=False,
    )
    assert train(tmp_path, f"{words} --epochs 10000", 3, kill).status not in (0, None)
    begin = int((run / "checkpoints" / "latest").read_text().rpartition("-")[2])
    assert begin >= 20
    steps, epoch = begin + 90, begin // 45 + 1
    jobs = [
        (3, "--trace", "steps by worker"),
        (2, "--sync local --local-steps 4", "weights differed by"),
        (3, "--sync gossip", "weights differed by"),
        (4, "--sync ssp --staleness 2 --slow rank=1,factor=2", "at most"),
    ]
    for ranks, more, text in jobs:
        ending = train(tmp_path, f"--resume {run} {more} --max-steps {steps}", ranks)
        assert ending.status == 0, ending.output
        assert text in unfolded(ending.output)
        check_told(run, ending.output, epoch)
        steps, epoch = steps + 90, (steps - 1) // 45 + 1
    records = read_metrics(run / "metrics.jsonl")
    # As many gradients as there are workers for each batch, whoever made them.
    for record in records:
        if (
            record["kind"] == "staleness"
            and record["workers"]
            and record["global_step"] <= begin + 90
        ):
            assert sum(worker["steps"] for worker in record["workers"]) % 3 == 0
    assert max(record["lead"] for record in records if record["kind"] == "staleness") > 0
    at = [record["global_step"] for record in records if record["kind"] == "train"]
    assert at == sorted(set(at))
    assert [record["kind"] for record in records].count("test") == 1
    assert max(record["accuracy"] for record in records if record["kind"] in ("eval", "test")) > 0.9
    trace = json.loads(gzip.decompress((run / "trace.json.gz").read_bytes()))
    assert breaches(trace) == []
    assert {"push", "pull"} <= {row["name"] for row in trace["traceEvents"]}


def test_a_signal_on_one_rank_saves_whole_batches(tmp_path, capsys):
    run = tmp_path / "run"
    term = once(
        lambda: lines(run / "metrics.jsonl") > 2,
        lambda: send(signal.SIGTERM, str(run), to="ranks", rank=1),
        ends=False,
    )
    ending = train(tmp_path, f"{FOR_EVER} --sync asp --out {run}", 3, term)
    assert ending.status == 128 + signal.SIGTERM
    assert ending.output.count("stopped by SIGTERM after step ") == 1
    step = int(ending.output.split("after step ")[1].split(";")[0])
    assert sorted(item.name for item in (run / "checkpoints").iterdir()) == [
        "latest",
        f"step-{step:08d}",
    ]
    last = [
        record for record in read_metrics(run / "metrics.jsonl") if record["kind"] == "staleness"
    ][-1]
    assert last["global_step"] == step
    on_ranks(main, ["--resume", str(run), "--max-steps", str(step + 2)], 3)
    assert f"{step + 2} steps in " in capsys.readouterr().out
