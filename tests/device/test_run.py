"""The train command on a device, as a user runs it: the host's numbers, resumed across backends,
failures in words.
"""

import json
import os
import sys

import numpy as np
import pytest

from tests.device.library import FOLDER
from tests.harness.job import mpirun, run
from tests.harness.slow import ONCE_MORE, once_more
from tests.train.jobs import ROOT, unfolded

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.host_only("each run chooses its backend itself"),
]

WORDS = "--dataset digits --max-steps 12 --epochs 3 --warmup-epochs 1 --log-every 1 --eval-every 0"
SMALL_MODEL = "--model mlp --hidden 24 16"
# Options, ranks: one of each way to use several ranks.
LAYOUTS = {
    "serial": ("--model cnn --hidden 16 --augment shift", 1),
    "clipped-parts": ("--model mlp --hidden 24 16 --dropout 0.2 --clip 0.5 --microbatches 3", 1),
    # in float32 a ReLU that tips over moves all after it
    "data": ("--model resnet --dtype float64", 2),
    "pipeline": ("--model cnn --hidden 16 --pp 2 --pipeline zero-bubble --split 3,3", 2),
    "tensor": ("--model mlp --hidden 24 16 --tp 3", 3),
    "fixed": ("--model mlp --hidden 24 16 --reduction fixed", 4),
    "local": ("--model mlp --hidden 24 16 --sync local --local-steps 3", 2),
    "gossip": ("--model mlp --hidden 24 16 --sync gossip", 3),
    # no two ranks are as fast: who of those goes first that come at the same moment is drawn
    "simulated": (
        (
            "--model mlp --hidden 24 16 --sync ssp --simulate 3 --slow"
            " ms=10;rank=1,factor=1.37;rank=2,factor=1.73"
        ),
        1,
    ),
}


def train(folder, backend, words, ranks=1, **environ):
    """Run the command, with the double of CuPy where it is to be on a device."""
    start = mpirun(ranks) if ranks > 1 else []
    command = [*start, sys.executable, "-m", "nnmpi.train", "--backend", backend, *words.split()]
    paths = [str(folder), str(ROOT), *([str(FOLDER)] if backend == "cupy" else [])]
    given = {"PYTHONPATH": os.pathsep.join(paths), **environ}
    return run(command, folder / "output", 120.0, given, cwd=folder)


def verify(folder, words, ranks, double):
    """Run the command that compares a layout with one rank, with the double of CuPy or without."""
    command = [*mpirun(ranks), sys.executable, "-m", "nnmpi", "verify", *words.split()]
    paths = [str(ROOT), *([str(FOLDER)] if double else [])]
    return run(
        command, folder / "output", 120.0, {"PYTHONPATH": os.pathsep.join(paths)}, cwd=folder
    )


def records(out, kind="train"):
    """Return what a run has recorded of a kind."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


@pytest.mark.parametrize("name", [once_more(name, name != "pipeline") for name in LAYOUTS])
def test_a_run_on_a_device_is_the_hosts(name, tmp_path):
    """Losses and gradients step by step, and the evaluation, under every way to use several
    ranks.
    """
    options, ranks = LAYOUTS[name]
    for backend in ("numpy", "cupy"):
        ending = train(tmp_path, backend, f"{WORDS} {options} --out {tmp_path / backend}", ranks)
        assert ending.status == 0, ending.output
    host, device = (records(tmp_path / backend) for backend in ("numpy", "cupy"))
    for key in ("loss", "grad_norm", "accuracy"):
        ours, theirs = ([item[key] for item in of] for of in (device, host))
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=1e-6, err_msg=key)
    ends = [records(tmp_path / backend, "test")[0]["loss"] for backend in ("numpy", "cupy")]
    assert ends[0] == pytest.approx(ends[1], rel=1e-3)
    assert (
        all(item["device_peak_bytes"] > 0 for item in device) and "device_peak_bytes" not in host[0]
    )


@pytest.mark.parametrize(
    "order", [once_more(("numpy", "cupy")), ("cupy", "numpy")], ids="-then-".join
)
def test_a_run_goes_on_with_the_other_backend(order, tmp_path):
    """Stopped after 6 of 12 steps and resumed elsewhere, it ends as one that stayed."""
    words = f"{WORDS} {SMALL_MODEL} --save-every 6steps"
    assert train(tmp_path, order[0], f"{words} --out {tmp_path / 'whole'}").status == 0
    first = train(tmp_path, order[0], f"{words.replace('12', '6')} --out {tmp_path / 'parts'}")
    assert first.status == 0, first.output
    second = train(tmp_path, order[1], f"--resume {tmp_path / 'parts'} --max-steps 12")
    assert second.status == 0, second.output
    losses = [[item["loss"] for item in records(tmp_path / name)] for name in ("whole", "parts")]
    assert len(losses[1]) == 12
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-4)


@pytest.mark.slow(ONCE_MORE)
def test_the_header_says_what_was_chosen(tmp_path):
    """Which device, how many ranks share it, and how much of its memory each may take."""
    limits = {"CUPY_GPU_MEMORY_LIMIT": ""}
    ending = train(tmp_path, "cupy", f"{WORDS} {SMALL_MODEL} --out {tmp_path / 'run'}", 2, **limits)
    assert ending.status == 0, ending.output
    assert "backend:     cupy on Fake device, device 0" in ending.output
    assert (
        "devices: 1 for 2 ranks, up to 2 ranks on one; 7.2 GiB of memory for each rank"
        in unfolded(ending.output)
    )
    assert "memory of the device:" in ending.output


def test_without_a_device_there_is_one_sentence(tmp_path):
    """Once for all ranks, before anything is written."""
    ending = train(tmp_path, "cupy", f"{WORDS} --out {tmp_path / 'run'}", 2, PYTHONPATH=str(ROOT))
    assert ending.status != 0
    assert (
        ending.output.count("backend cupy cannot be used") == 1 and "Traceback" not in ending.output
    )
    assert not (tmp_path / "run").exists()


def test_too_little_memory_on_one_rank_ends_all(tmp_path):
    """In the middle of a run: a sentence that says what used it and what helps, and nobody waits
    for ever.
    """
    (tmp_path / "greedy.py").write_text(
        "import os, cupy\nfrom nnmpi import nn\nfrom nnmpi.nn.mode import current\nclass"
        " Greedy(nn.Module):\n    def forward(self, x):\n        if current().training and"
        " current().step == 5 and os.environ['OMPI_COMM_WORLD_RANK'] == '1':\n           "
        " cupy.get_default_memory_pool().set_limit(size=2**20)\n            cupy.zeros(2**20)\n    "
        "    return x\ndef model(shape, classes):\n    return nn.Sequential(nn.Flatten(), Greedy(),"
        " nn.Linear(64, classes))\n"
    )
    out = tmp_path / "run"
    ending = train(
        tmp_path, "cupy", f"{WORDS} --model greedy.py:model --save-every 2steps --out {out}", 2
    )
    assert ending.status != 0
    assert "has no room for" in ending.output and "lower --batch-size" in ending.output, (
        ending.output
    )
    assert "Traceback" not in ending.output
    saved = sorted(item.name for item in (out / "checkpoints").iterdir() if item.is_dir())
    assert saved and all("4" in item or "2" in item for item in saved)


@pytest.mark.slow(ONCE_MORE)
def test_layouts_on_a_device_can_be_verified(tmp_path):
    """By the command that compares them with one rank, which is then on the device, too."""
    words = "--backend cupy --model mlp --hidden 12 10 --pp 2 --steps 2"
    ending = verify(tmp_path, words, 2, double=True)
    assert ending.status == 0 and "backend cupy on Fake device" in ending.output, ending.output
    assert "NOT EQUAL" not in ending.output and "compared with one rank" in ending.output
    ending = verify(tmp_path, words, 2, double=False)
    assert ending.status != 0 and ending.output.count("backend cupy cannot be used") == 1
