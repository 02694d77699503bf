"""The train command with pipelines and shards: what it prints, records, traces and leaves."""

import gzip
import io
import json
from pathlib import Path

import pytest

import nnmpi.train.session as training
from nnmpi.base.command import Console
from nnmpi.train.config import assemble
from nnmpi.train.metrics import read_metrics
from tests.chrome import arrows, breaches, names, spans
from tests.train.jobs import unfolded

pytestmark = pytest.mark.mpi


@pytest.fixture
def train(group, tmp_path_factory):
    """Return a function that trains on the group's ranks and returns the run's folder and what was
    printed.
    """
    base = Path(group.share(str(tmp_path_factory.mktemp("runs"))))

    def run(meanwhile=None, **options):
        text = io.StringIO()
        values = {
            "out": str(base / f"run{len(list(base.iterdir()))}"),
            "epochs": 1,
            "dataset": "digits",
            **options,
        }
        folder = Path(group.share(values["out"]))
        console = Console(quiet=not group.is_root, stream=text)
        with training.begin(assemble({**values, "out": str(folder)}), group, console) as loop:
            if meanwhile is not None and group.is_root:
                meanwhile(folder)
            loop.run()
        group.barrier()
        return folder, text.getvalue().splitlines()

    return run


def everywhere(group, right):
    assert all(group.gather(bool(right)))


def test_a_pipeline_is_told_traced_and_measured(group, train):
    folder, lines = train(pp=group.size, model="resnet", trace=True, batch_size=719, verbose=True)
    right = True
    if group.is_root and group.size > 1:
        text = "\n".join(lines)
        with gzip.open(folder / "trace.json.gz", "rt") as file:
            trace = json.load(file)
        recorded = [row for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "train"]
        ranks = set(names(trace, "process_name").values())
        done = [name for _, _, name, _, _ in spans(trace)]
        last, microbatches = group.size - 1, 4 * group.size
        checks = [
            f"pipeline:    1f1b, {group.size} stages, {microbatches} microbatches of" in text,
            f"stage {last}:     pipeline rank {last}, layer" in text,
            "pipeline pass" in text and "simulated" in text and "waiting for stages" in text,
            not breaches(trace),
            ranks == {f"rank {rank}: d0 p{rank} t0" for rank in range(group.size)},
            done.count(f"{last}F{microbatches - 1}") == 2,
            len(arrows(trace)) == 2 * 2 * microbatches * last,
            all(row["wait_s"] > 0 for row in recorded),
        ]
        right = all(checks)
        assert right, (checks, text)
    everywhere(group, right)


def test_pipedream_records_its_staleness(group, train):
    if group.size == 1:
        return
    folder, lines = train(
        pp=group.size, model="mlp", pipeline="pipedream", lr=1e-3, max_steps=3, log_every=1
    )
    right = True
    if group.is_root:
        rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "train"]
        right = all(
            row["grad_norm"] is None and 0 < row["staleness"] <= group.size - 1 for row in rows
        )
        right = right and any("staleness by rank: at most" in line for line in lines)
    everywhere(group, right)


def test_without_a_pipeline_the_trace_has_each_rank(group, train):
    folder, _ = train(model="mlp", trace=True, max_steps=2)
    right = True
    if group.is_root:
        with gzip.open(folder / "trace.json.gz", "rt") as file:
            trace = json.load(file)
        done = [name for _, _, name, _, _ in spans(trace)]
        right = not breaches(trace) and done.count("0F0") == 2 * group.size
        # in pieces where it waits for the others
        right = right and done.count("update") >= 2 * group.size
    everywhere(group, right)


def test_a_trace_that_cannot_be_written_does_not_cost_the_run(group, train):
    """A start would refuse what is in its place already."""
    folder, lines = train(
        lambda folder: (folder / "trace.json.gz").mkdir(), max_steps=3, trace=True
    )
    text = "\n".join(lines)
    right = not group.is_root or (
        "no trace: the trace cannot be written to " in unfolded(text) and "3 steps in" in text
    )
    everywhere(group, right and (folder / "checkpoints" / "latest").exists())
