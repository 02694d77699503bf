"""`comm_bytes` and `comm_calls`: the arrays that collectives summed, once each."""

import numpy as np
import pytest

from nnmpi import GradientExchange, Layout, data, models
from nnmpi.nn.chain import open_chain
from tests.worker_options import arranged

NUMBERS = 32  # bytes of a step's loss, score, targets and norm


def mlp():
    return models.mlp((6,), 3, hidden=[8, 8])


def traffic(group, layout, model, x, y):
    """Return a step's bytes and calls, without its numbers', and this rank's parameters' bytes."""
    exchange = GradientExchange(fused_update=False)
    worker = arranged(model, group, layout, x[:1], exchange=exchange)
    part, where = worker.model, worker.arrangement
    samples = data.Dataset("rows", x, y, 17)
    loader = data.Loader(samples, 8, where, microbatches=4, shuffle=False)
    report = [worker.step(batch) for batch in loader.epoch(0)][0]
    parameters = sum(parameter.data.nbytes for parameter in part.parameters())
    return report.comm_bytes - NUMBERS * (group.size > 1), report.comm_calls, parameters


@pytest.mark.simulated(min_size=1, max_size=4)
def test_sums_are_counted_once(group):
    x, y = np.ones((8, 6), "float32"), np.arange(8) % 3
    alone = group.size == 1
    nbytes, calls, gradients = traffic(group, Layout(dp=group.size), mlp(), x, y)
    # flat gradients have gaps
    assert (nbytes, calls) == (0, 0) if alone else gradients <= nbytes < 1.3 * gradients
    assert calls == (0 if alone else 2)
    if group.size == 2:
        assert traffic(group, Layout(pp=2, split=(3, 3)), mlp(), x, y)[:2] == (0, 1)
    if group.size == 4:
        nbytes, calls, gradients = traffic(group, Layout(dp=2, pp=2, split=(3, 3)), mlp(), x, y)
        assert gradients <= nbytes < 1.3 * gradients and calls == 2


@pytest.mark.simulated(min_size=2, max_size=2)
def test_tied_weights_are_counted_and_activations_are_not(group):
    def gpt():
        return models.gpt(17, 8, 16, 2, 2)

    tokens, count = np.ones((8, 8), np.int64), len(open_chain(gpt()))
    layout = Layout(pp=2, split=(count // 2, count - count // 2), pipeline="gpipe")
    nbytes, calls, _ = traffic(group, layout, gpt(), tokens, tokens)
    assert (nbytes, calls) == (17 * 16 * 4, 2)
