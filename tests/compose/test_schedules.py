"""Schedules of a layout: what they do is what their instructions say, whatever their name."""

from itertools import chain

import numpy as np
import pytest

import nnmpi
from nnmpi import Layout, data, models
from nnmpi.base.errors import HelpAsked, ScheduleError
from nnmpi.lab.verify import main as verify
from nnmpi.schedule import schedules
from nnmpi.schedule.check import check
from nnmpi.schedule.lower import lower
from nnmpi.schedule.schedule import Kind
from nnmpi.train.cli import parse
from tests.harness.refusals import caught, refuses, usage_error
from tests.worker_options import arranged

SPLITS = {1: (3, 3), 2: (2, 1, 1, 2)}  # of six layers over two ranks, by stages on each


def losses(group, schedule, microbatches=4):
    """Return a few steps' losses."""
    layout = Layout(pp=2, pipeline=schedule, split=SPLITS[stages(schedule)])
    worker = arranged(models.mlp((6,), 3, hidden=[8, 8]), group, layout, lr=0.5)
    where = worker.arrangement
    x = np.random.default_rng(0).normal(size=(8, 6)).astype("f")
    samples = data.Dataset("rows", x, np.arange(8) % 3, 3)
    loader = data.Loader(samples, 8, where, microbatches=microbatches, shuffle=False)
    return [worker.step(batch).loss for epoch in range(3) for batch in loader.epoch(epoch)]


def stages(schedule):
    return Layout(pp=2, pipeline=schedule).stages_per_rank


def copied(name):
    """Return a user's function with the instructions of one of the package's."""
    row = schedules.SCHEDULES[name]
    more = (row.stages,) if row.any_stages else ()
    return lambda rank, ranks, microbatches: list(row.rule(rank, ranks, microbatches, *more))


ON_2 = pytest.mark.simulated(min_size=2, max_size=2)


@ON_2
@pytest.mark.parametrize("name", schedules.TRAINING)
def test_a_function_is_what_its_instructions_are(group, name):
    """The package's own as functions, and copies of them by a user, behave as the names do."""
    right = losses(group, name)
    assert losses(group, schedules.SCHEDULES[name].rule) == right
    assert losses(group, copied(name)) == right
    layout = Layout(pp=2, pipeline=copied(name))
    assert layout.asynchronous == Layout(pp=2, pipeline=name).asynchronous
    assert layout.home is Layout(pp=2, pipeline=name).home


def test_who_updates_without_a_flush():
    assert Layout(pp=2, pipeline="pipedream").asynchronous
    assert not Layout(pp=2, pipeline="1f1b").asynchronous


@pytest.mark.parametrize("name", schedules.SCHEDULES)
def test_a_row_says_what_its_instructions_are(name):
    """Planner, help and layouts read the row, so each has its words and true facts."""
    row, made = schedules.SCHEDULES[name], schedules.example_of(name)
    assert row.help and not row.help.endswith(".")
    assert (made.virtual, made.trains) == (row.stages, row.trains)
    assert row.home in (made.home, None)
    tried = {schedules.make(name, 3, 6, stages).virtual for stages in row.tried}
    assert tried == {*row.tried}
    assert row.trains and not made.asynchronous or not row.tried, "the planner compares equal runs"


def test_help_explains_every_schedule():
    with pytest.raises(HelpAsked) as asked:
        parse(["--help", "pipeline"])
    text = " ".join(str(asked.value).split())
    for name in schedules.TRAINING:
        assert f" {name}: {schedules.SCHEDULES[name].help}" in text
        assert f"{name}: {schedules.SCHEDULES[name].help}." in " ".join(Layout.__doc__.split())


def test_interleaved_is_interleaved():
    layout = Layout(pp=2, pipeline="interleaved")
    assert layout.stages_per_rank == 2 and Layout(pipeline="interleaved").stages_per_rank == 2
    assert Layout(pp=2, pipeline="interleaved", virtual_stages=3).stages_per_rank == 3
    made = schedules.make(layout.pipeline, 2, 4, layout.stages_per_rank)
    assert {item.stage for item in chain.from_iterable(made.programs)} == {0, 1, 2, 3}


@ON_2
def test_too_few_layers_for_interleaved_are_refused(group):
    x = np.zeros((1, 6), "float32")
    layout = Layout(pp=2, pipeline="interleaved")
    error = caught(lambda: nnmpi.arrange(models.mlp((6,), 3, hidden=[]), group, layout, x))
    assert "fewer than 4 stages" in str(error)


def forward_only(rank, ranks, microbatches):
    return [Kind.F.at(rank, m) for m in range(microbatches)]


def late(rank, ranks, microbatches):
    """A schedule that forgets its backward passes for some numbers of microbatches only."""
    both = (Kind.F, Kind.B) if microbatches != 3 else (Kind.F,)
    return [kind.at(rank, m) for m in range(microbatches) for kind in both]


def test_training_needs_backward_passes():
    for pp in ("auto", 2, 3):
        usage_error(
            "forward_only has no backward passes, so it would", Layout, pp=pp, pipeline=forward_only
        )
    usage_error(
        "pipeline inference has no backward passes", Layout, pp=2, pipeline=schedules.inference
    )
    made = lower(schedules.make(late, 2, 3))
    check(made)
    refuses(
        ScheduleError, "there are no backward passes, so it would train", check, made, trains=True
    )


@ON_2
def test_backward_passes_are_needed_for_the_microbatches_of_a_step(group):
    """A layout has asked for another number of them."""
    refuses(ScheduleError, "there are no backward passes", losses, group, late, microbatches=3)


@pytest.mark.parametrize("schedule", ["forward_only", "pipedream"])
def test_verify_refuses_by_instructions(schedule):
    name = (
        f"{__name__}:{schedule}"
        if schedule != "pipedream"
        else "nnmpi.schedule.schedules:pipedream"
    )
    words = f"--model mlp --shape 6 --pp 2 --pipeline {name}".split()
    sentence = "no backward passes" if schedule != "pipedream" else "stale weights"
    usage_error(sentence, nnmpi.simulate, lambda group: verify(words, group), 2)
