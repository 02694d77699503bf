"""--precision is refused where nothing computes in it."""

import pytest

from nnmpi.base.errors import UsageError


@pytest.mark.parametrize(
    "words, message",
    [
        (
            "--precision bf16 --dtype float64",
            "--precision bf16 rounds float32, and --dtype is float64",
        ),
        *(
            (f"--precision {name} --backend numpy", f"--precision {name} needs")
            for name in ("tf32", "bf16", "fp16")
        ),
        ("--precision fp16 --jit", "--jit compiles only for float32 on the CPU"),
        ("--precision fp8", "fp8"),
    ],
)
def test_what_does_not_go_together(train, words, message):
    with pytest.raises(UsageError, match=message):
        train(f"--model mlp --dataset iris --max-steps 1 {words}")
