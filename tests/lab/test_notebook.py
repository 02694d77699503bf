"""What a notebook shows of values, and that it shows their text without the wing that draws."""

import numpy as np
import pytest

import nnmpi
from nnmpi import Layout, Tensor
from nnmpi.base import wings
from nnmpi.comm.algorithms.registry import COLLECTIVES
from nnmpi.schedule.schedules import make
from nnmpi.train.cli import main

X = Tensor(np.eye(2, dtype="float32"), requires_grad=True)


def program():
    step = nnmpi.compile(lambda x: (x * x).sum())
    for _ in range(3):
        step(X.numpy())
    return step.program


@pytest.mark.host_only("the results of a device's program have no place that could be drawn")
def test_values_are_drawn(tmp_path, monkeypatch):
    words = f"--dataset iris --model mlp --epochs 1 --out {tmp_path}/run"
    nnmpi.simulate(lambda group: main(words.split(), group), 1)
    shown = {
        COLLECTIVES["all-gather", "ring"]: "round 0  0 -&gt; 1  1 -&gt; 2  2 -&gt; 3  3 -&gt; 0",
        make("1f1b", 2, 3): "rank 1  .  F0 B0--- F1 B1---",
        Layout(dp=1, pp=2, tp=2): "rank 3  d0 p1 t1",
        Layout(): "for any number of ranks",
        X @ X: "(2, 2) float32, computed by MatMul\nTensor([[1., 0.]",
        program(): "%0##",
        nnmpi.load(f"{tmp_path}/run"): " after epoch 1\nlayout",
    }
    for value, text in shown.items():
        assert text in value._repr_html_(), value
    monkeypatch.setattr(wings, "find_spec", lambda name: None)
    assert [value._repr_html_() for value in shown] == [None] * len(shown)
