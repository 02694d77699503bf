"""Every section refuses wrong values with a sentence that names the option, the value and what
would work.
"""

from pathlib import Path

import pytest

from nnmpi.base.errors import UsageError
from nnmpi.base.units import Every
from nnmpi.train.config import (
    Config,
    DataConfig,
    ModelConfig,
    NumericsConfig,
    OptimizationConfig,
    ParallelConfig,
    RunConfig,
)

WRONG_SCHEDULES = (
    "steps",
    "cosine:3",
    "step:0,0.1",
    "step:10,0",
    "step:10,1.5",
    "step:1e300,0.1",
    "step:10",
)
WRONG = {
    ModelConfig: [
        ({"hidden": (3, 0), "model": "mlp"}, "--hidden is 3,0; give whole numbers, 1"),
        ({"dropout": 1.0, "model": "mlp"}, "--dropout is 1.0"),
        ({"dropout": -0.1, "model": "mlp"}, "--dropout is -0.1"),
        (
            {"hidden": (5,), "model": "resnet"},
            "--hidden is for --model mlp or cnn or llama, not for resnet",
        ),
        ({"activation": "tanh", "model": "cnn"}, "--activation is for --model mlp, not for cnn"),
        ({"layers": 3}, "--layers is for --model lstm or gpt or llama, not for cnn; leave it out"),
        ({"heads": 2, "model": "lstm"}, "--heads is for --model gpt or llama, not for lstm"),
        ({"heads": 3, "model": "gpt"}, "--features 128 is not a multiple of --heads 3"),
        ({"context": 0, "model": "gpt"}, "--context is 0; give a whole number, 1 or more"),
        (
            {"dropout": 0.5, "model": "resnet"},
            "--dropout is for --model mlp or cnn or lstm or gpt, not",
        ),
        ({"experts": 4}, "--experts is for --model gpt, not"),
        ({"model": "gpt", "experts_top": 3}, "--experts-top and --experts-capacity need --experts"),
        (
            {"model": "gpt", "experts": 2, "experts_top": 3},
            "--experts-top 3 is more than --experts 2",
        ),
        ({"model": "gpt", "experts": 2, "pretrained": Path("x")}, "--pretrained has no experts"),
        ({"model": "gpt", "kv_heads": 2}, "--kv-heads is for --model llama, not for gpt"),
        ({"model": "llama", "dropout": 0.1}, "--dropout is for --model mlp or"),
        ({"model": "llama", "kv_heads": 3}, "--kv-heads 3 is no divisor of --heads 4"),
        ({"model": "llama", "features": 12}, "--features 12 / --heads 4 is odd"),
        ({"model": "llama", "hidden": (3, 4)}, "--hidden has 2 widths"),
        ({"model": "llama", "theta": 0.0}, "--theta is 0.0"),
        ({"model": "llama", "tied": True, "pretrained": Path("x")}, "--tied is in the files"),
    ],
    DataConfig: [
        ({"dataset": ""}, "--dataset is empty"),
        ({"test_fraction": 0.0}, "--test-fraction is 0.0"),
        ({"test_fraction": 1.0}, "--test-fraction is 1.0"),
        (
            {"partition": "iid", "balance": True},
            "--partition and --balance each give an order; leave one of them out",
        ),
        (
            {"shuffle_block": 4, "balance": True},
            "--shuffle-block and --balance each give an order",
        ),
    ],
    OptimizationConfig: [
        ({"epochs": 0}, "--epochs is 0"),
        ({"max_steps": 0}, "--max-steps is 0"),
        ({"batch_size": 0}, "--batch-size is 0"),
        ({"batch_size": -3}, "--batch-size is -3"),
        ({"lr": -1.0}, "--lr is -1.0"),
        ({"lr": 0.0}, "--lr is 0.0"),
        ({"lr": float("nan")}, "--lr is nan"),
        ({"lr": float("inf")}, "--lr is inf"),
        ({"momentum": 1.0, "optimizer": "sgd"}, "--momentum is 1.0"),
        (
            {"momentum": 0.9, "optimizer": "adam"},
            "--momentum is for --optimizer sgd or rmsprop or muon, not",
        ),
        ({"weight_decay": -1e-4}, "--weight-decay is -0.0001"),
        ({"warmup_epochs": -1.0}, "--warmup-epochs is -1.0"),
        *(({"lr_schedule": text}, f"--lr-schedule is {text}") for text in WRONG_SCHEDULES),
        (
            {"warmup_epochs": 1e300},
            "--warmup-epochs is 1e+300; give a finite number, 0 or more, and below",
        ),
        ({"label_smoothing": 1.0}, "--label-smoothing is 1.0"),
    ],
    NumericsConfig: [({"clip": 0.0}, "--clip is 0.0")],
    ParallelConfig: [
        ({"microbatches": 0}, "--microbatches is 0"),
        ({"dp": 0}, "--dp is 0"),
        ({"offload": ""}, "--offload is empty; give a folder or host"),
    ],
    RunConfig: [
        ({"seed": -1}, "--seed is -1"),
        ({"log_every": 0}, "--log-every is 0"),
        ({"out": "a", "resume": "b"}, "--resume continues in the run's folder b"),
    ],
}


@pytest.mark.parametrize(
    "section, values, text",
    [pytest.param(section, *row, id=row[1]) for section, rows in WRONG.items() for row in rows],
)
def test_wrong_values_are_refused_with_a_sentence(section, values, text):
    with pytest.raises(UsageError) as caught:
        section(**values)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_defaults_and_edges_are_accepted():
    assert Config().model.model == "cnn"
    ModelConfig(model="mlp", hidden=())
    ModelConfig(model="mlp", hidden=(1,), dropout=0.0, activation="gelu")
    OptimizationConfig(batch_size="full", optimizer="sgd", momentum=0.9, weight_decay=0.0)
    NumericsConfig(clip=1e-9)
    OptimizationConfig(lr_schedule="step:0.5,1.0")
    RunConfig(eval_every=Every("0"), save_every=Every("3steps"))


def test_sections_cannot_be_changed():
    with pytest.raises(AttributeError):
        Config().run.seed = 3
