"""Schedules of a layout: what they do is what their instructions say, whatever their name."""

from itertools import chain

import numpy as np
import pytest

import nnmpi
from nnmpi import Layout, data, models
from nnmpi.base.errors import ScheduleError
from nnmpi.lab.verify import main as verify
from nnmpi.schedule import schedules
from nnmpi.schedule.check import check
from nnmpi.schedule.lower import lower
from nnmpi.schedule.schedule import Kind
from tests.harness.refusals import caught, refuses, usage_error
from tests.worker_options import arranged

TRAINING = ["gpipe", "1f1b", "zero-bubble", "v-half", "pipedream"]


def losses(group, schedule, microbatches=4):
    """Return a few steps' losses."""
    layout = Layout(
        pp=2, pipeline=schedule, split=(2, 1, 1, 2) if stages(schedule) == 2 else (3, 3)
    )
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
    more = (2,) if name == "interleaved" else ()
    return lambda rank, ranks, microbatches: list(
        schedules.SCHEDULES[name](rank, ranks, microbatches, *more)
    )


ON_2 = pytest.mark.simulated(min_size=2, max_size=2)


@ON_2
@pytest.mark.parametrize("name", TRAINING)
def test_a_function_is_what_its_instructions_are(group, name):
    """The package's own as functions, and copies of them by a user, behave as the names do."""
    right = losses(group, name)
    assert losses(group, schedules.SCHEDULES[name]) == right
    assert losses(group, copied(name)) == right
    layout = Layout(pp=2, pipeline=copied(name))
    assert layout.asynchronous == (name == "pipedream")
    assert layout.home is Layout(pp=2, pipeline=name).home


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
