"""The names, types and conversion of options; none that is listed here may go."""

from pathlib import Path

import pytest

from nnmpi import optim
from nnmpi.base.command import options_of
from nnmpi.base.errors import UsageError
from nnmpi.train.cli import parse
from nnmpi.train.config import (
    Config,
    OptimizationConfig,
    RunConfig,
    all_options,
    assemble,
    check,
    flatten,
)

# Scripts and notes of other people depend on these: removing or renaming one is a breaking change.
# A new option needs no line here before it is released.
NAMES = """
model hidden activation dropout layers features heads experts experts_top experts_capacity
context pretrained
dataset tokenizer text_columns text_samples target drop sample_shape decimal data_dir
test_fraction augment partition normalize
epochs max_steps stop_after batch_size optimizer loss lr momentum weight_decay lr_schedule
warmup_epochs
label_smoothing class_weights precision clip ema dp pp tp sp pipeline virtual_stages split
reduction zero expert_parallel memory_limit activation_memory offload offload_state allreduce
layout microbatches
sync staleness local_steps outer_lr outer_momentum slow network simulate ranks backend dtype
jit seed out resume trust config log_every callback quiet verbose eval_every save_every trace
keep_best early_stopping least_gain stall_limit
"""


def test_no_option_went():
    assert set(NAMES.split()) <= set(all_options())
    # and no two sections have an option of the same name
    assert len(all_options()) == sum(
        len(options_of(type(section))) for section in vars(Config()).values()
    )


def test_flatten_and_assemble_are_inverse():
    config = Config(
        optimization=OptimizationConfig(epochs=3, batch_size="full"), run=RunConfig(out=Path("a/b"))
    )
    flat = flatten(config)
    assert flat["out"] == "a/b"
    assert flat["hidden"] == [128, 64]
    assert assemble(flat) == config


def test_names_may_be_written_with_dashes():
    assert check({"batch-size": 3, "log_every": 2}, "x") == {"batch_size": 3, "log_every": 2}


@pytest.mark.parametrize(
    "flat, text",
    [
        ({"wait-decay": 1}, "x: wait-decay is not an option; did you mean weight-decay?"),
        ({"qqqqqq": 1}, "x: qqqqqq is not an option"),
        ({"lr": "fast"}, "x: lr is 'fast'; it must be a number"),
        ({"lr": True}, "x: lr is True; it must be a number"),
        ({"epochs": 1.5}, "x: epochs is 1.5; it must be a whole number"),
        ({"epochs": True}, "x: epochs is True; it must be a whole number"),
        ({"jit": 1}, "x: jit is 1; it must be one of auto, on, off"),
        ({"hidden": [3, 4.5]}, "x: hidden is [3, 4.5]; it must be a list of whole numbers"),
        ({"normalize": "yes"}, "x: normalize is 'yes'; it must be true or false"),
        (
            {"optimizer": "sgdd"},
            (f"x: optimizer is 'sgdd'; it must be one of {', '.join(optim.NAMES)} or FILE.py:NAME"),
        ),
        ({"batch_size": "all"}, "x: batch_size is 'all'; it must be a whole number or \"full\""),
        ({"out": True}, "x: out is True; it must be a path"),
        ({"clip": "no"}, "x: clip is 'no'; it must be a number"),
    ],
)
def test_wrong_values_from_files_are_refused(flat, text):
    with pytest.raises(UsageError) as caught:
        check(flat, "x")
    assert str(caught.value) == text


def test_values_mean_what_they_mean_on_the_command_line():
    assert check({"lr": 1, "hidden": 3, "clip": None, "jit": False}, "x") == {
        "lr": 1.0,
        "hidden": (3,),
        "clip": None,
        "jit": "off",
    }


# Options that are auto, on or off: all forms in which they can be written.


@pytest.mark.parametrize(
    "words, jit",
    [
        ("", "auto"),
        ("--jit", "on"),
        ("--no-jit --lr 0.1", "off"),
        ("--jit=off", "off"),
        ("--jit auto", "auto"),
    ],
)
def test_every_form_of_a_switch_is_read(words, jit):
    assert parse(words.split()).run.jit == jit
    assert assemble({"jit": {"on": True, "off": False}.get(jit, jit)}).run.jit == jit
