"""What the verify command's words mean, and which it refuses."""

import pytest

from nnmpi.command import HelpAsked
from nnmpi.errors import UsageError
from nnmpi.verify.options import parse


def test_defaults_are_a_small_contract() -> None:
    options = parse([])
    trial = options.trial
    assert (options.model.model, trial.dataset, trial.shape, trial.dtype) == ("cnn", "digits", None, "float64")
    assert (trial.samples, options.optimization.batch_size, trial.steps, options.microbatches) == (90, 29, 5, 4)
    assert (options.parallel.dp, options.parallel.pp, options.parallel.tp) == ("auto", "auto", "auto")
    assert (options.optimization.optimizer, options.optimization.momentum) == ("sgd", 0.9)


def test_every_word_has_its_place() -> None:
    text = (
        "--model a/b.py:build --shape 8 8 3 --classes 7 --samples 20 --batch-size 6 --steps 2 "
        "--optimizer adamw --lr 0.1 --weight-decay 0.2 --clip 1 --dtype float32 --seed 4 --dp 2 --pp 3 --tp 1 "
        "--pipeline interleaved --virtual-stages 2 --microbatches 5 --split 1,2,3 --reduction fixed "
        "--memory-limit 2MiB --activation-memory 1MiB --allreduce ring"
    )
    options = parse(text.split())
    assert (options.model.model, options.trial.shape, options.trial.classes) == ("a/b.py:build", (8, 8, 3), 7)
    assert options.trial.samples == 20
    assert (options.trial.steps, options.trial.dtype, options.trial.seed, options.microbatches) == (2, "float32", 4, 5)
    rule, parallel = options.optimization, options.parallel
    assert (rule.optimizer, rule.lr, rule.momentum, rule.weight_decay, rule.clip) == ("adamw", 0.1, 0.0, 0.2, 1.0)
    assert (parallel.dp, parallel.pp, parallel.tp, parallel.pipeline, parallel.virtual_stages) == (
        *(2, 3, 1),
        "interleaved",
        2,
    )
    assert (parallel.layers_per_stage, parallel.reduction) == ((1, 2, 3), "fixed")
    assert parallel.activation_memory_bytes == 2**20
    assert (parallel.memory_limit_bytes, parallel.allreduce) == (2**21, "ring")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--pipeline pipedream", "--pipeline pipedream is not the serial run"),
        ("--dp 0", "--dp is 0; give a whole number, 1 or more"),
        ("--dp x", '--dp is x; it must be a whole number or "auto"'),
        ("--shape", "--shape is empty"),
        ("--shape 3 0", "--shape is 0"),
        ("--classes 3", "--classes belongs to --shape"),
        ("--model gpt --shape 3", "--model gpt is verified on random tokens; leave --shape and --dataset out"),
        ("--model lstm --sp 2", "--sp 2 shares out the positions of sequences, and --model lstm takes one after the"),
        ("--samples 0", "--samples is 0"),
        ("--model resnet --hidden 3", "--hidden is for --model mlp or cnn"),
        ("--step 3", "--step is not an option; did you mean --steps"),
        ("--split 1,x", "--split is '1,x'"),
    ],
)
def test_what_makes_no_sense_is_a_sentence(words: str, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(words.split())
    assert str(caught.value).startswith(text)
    assert "\n" not in str(caught.value)


def test_help_is_text() -> None:
    with pytest.raises(HelpAsked, match="--virtual-stages"):
        parse(["--help"])
