"""A parameter server, step by step: versions, staleness, and what an update is made of."""

import numpy as np
import pytest

from nnmpi.asynchronous.server import ParameterServer, Push
from nnmpi.comm.synchrony.sync import Bound
from nnmpi.nn import Parameter
from nnmpi.optim import SGD, Adam
from nnmpi.tensor import FlatStorage

LR = 0.5


class Server:
    """A server of two weights, whose workers push gradients of equal numbers, for parts of
    batches.
    """

    def __init__(self, workers, bound, adam=False, batches=100):
        self.parameter = Parameter((2,), lambda generator, shape: np.zeros(shape))
        self.storage = FlatStorage({"w": self.parameter}, {"w": np.zeros(2, "float64")}, np.zeros)
        self.given = Adam(self.storage, 0.1) if adam else SGD(self.storage, 0.1)
        self.server = ParameterServer(self.storage, self.given, workers)
        self.server.open(0, batches, None if bound is None else Bound(bound))
        self.tasks = {}
        self.versions = {}
        self.release()

    @property
    def weight(self):
        """The first weight."""
        return float(self.server.master[0][0])

    def release(self):
        """Return who may go on."""
        released = self.server.release()
        self.tasks |= released
        self.versions |= dict.fromkeys(released, self.server.version)
        return list(released)

    def push(self, worker, gradient=1.0, rows=2, of=4, lr=LR, **more):
        """Let a worker push a gradient."""
        task = self.tasks[worker]
        push = Push(
            batch=task.batch,
            part=task.part,
            samples=rows,
            targets=rows,
            global_targets=of,
            lr=lr,
            version=self.versions[worker],
            **more,
        )
        self.server.push(worker, push, [np.full_like(self.storage.data[0], gradient)])

    def play(self, workers):
        """Let workers push one after the other, and return who may go on after each."""
        result = []
        for worker in workers:
            self.push(int(worker))
            result.append(self.release())
        return result


@pytest.mark.parametrize(
    "workers, bound, pushes, released, updates, stale",
    [
        # pulled 0, 1, 2, 4 and used at 0, 1, 3, 4; pulled 0, 3, 6, 7 and used at 2, 5, 6, 7
        (
            2,
            None,
            "00100111",
            [[0], [0], [1], [0], [0], [1], [1], [1]],
            8,
            [{0: 3, 1: 1}, {0: 2, 2: 2}],
        ),
        (
            3,
            None,
            "012012",
            [[0], [1], [2], [0], [1], [2]],
            6,
            [{0: 1, 2: 1}, {1: 1, 2: 1}, {2: 2}],
        ),
        # a worker waits with its second gradient for the other's first one, and both make an update
        (2, 1, "001", [[0], [], [0, 1]], 2, [{0: 2}, {1: 1}]),
        (3, 1, "00112", [[0], [], [1], [], [0, 1, 2]], 3, [{0: 2}, {0: 1, 1: 1}, {2: 1}]),
        (3, 0, "201", [[], [], [0, 1, 2]], 1, [{0: 1}] * 3),
    ],
)
def test_who_goes_on_and_what_is_an_update(workers, bound, pushes, released, updates, stale):
    server = Server(workers, bound)
    assert server.play(pushes) == released
    assert server.server.version == updates
    assert server.server.staleness.histograms == stale
    assert server.weight == pytest.approx(
        -LR * (len(pushes) if all(released) or released[-1] else 0)
    )


def test_one_update_of_a_batch_has_exactly_its_rate_and_no_order_of_arrival():
    result = set()
    for order in ((3, 1, 4, 0, 5, 9, 2, 6, 8, 7), range(10)):
        server = Server(10, 0)
        for worker in order:
            assert server.weight == 0
            server.push(worker, gradient=0.1 * worker, rows=1, of=10, lr=0.3)
            released = server.release()
        assert released == list(range(10))
        assert server.server.optimizer.lr == 0.3  # ten times 0.1 added up is not 1.0
        result.add(server.weight)
    assert len(result) == 1


def test_an_update_of_a_part_has_a_mean_gradient_and_a_part_of_the_rate():
    server = Server(2, None, adam=True)
    server.push(0, gradient=3.0, rows=1, of=4)
    server.release()
    assert server.server.optimizer.lr == LR / 4
    np.testing.assert_allclose(server.server.optimizer.slots()["m"][0], 0.1 * 3.0 * 4)
    assert server.weight == pytest.approx(-LR / 4)
    server.push(1, rows=0)
    assert server.release() == [1]
    assert server.server.version == 1  # a gradient of no targets changes nothing


def test_rates_of_several_batches_are_weighted_by_their_shares():
    server = Server(2, 1)
    server.play("0")
    before = server.weight
    server.push(0, gradient=4.0, rows=1, of=4, lr=0.2)
    server.release()
    server.push(1, gradient=1.0, rows=3, of=4, lr=0.4)
    server.release()
    assert server.server.optimizer.lr == pytest.approx(0.2 / 4 + 0.4 * 3 / 4)
    assert server.weight - before == pytest.approx(-(0.2 / 4 + 0.4 * 3 / 4) * 5.0)


@pytest.mark.parametrize("how", ["signal", "broken"])
def test_a_segment_ends_early(how):
    """After a signal with the batch that was begun; after a broken gradient, which is not used, at
    once.
    """
    server = Server(3, None)
    server.push(1, gradient=np.nan if how == "broken" else 1.0, **{how: True})
    assert server.release() == []
    server.play("02")
    assert server.server.controller.is_over
    assert set(server.tasks.values()) == {None}
    assert server.server.controller.batches_done == 1  # all of its parts had been assigned
    assert server.weight == pytest.approx(-LR * (3 if how == "signal" else 2))


def test_state_and_weights_go_back_and_frozen_parameters_stay():
    server = Server(1, None, adam=True, batches=2)
    server.play("0")
    server.parameter.requires_grad = False
    before = server.weight
    server.play("0")
    server.server.close()
    assert server.given.steps == 2
    assert server.storage.data[0][0] == server.weight == before
    assert server.given.slots()["m"][0].any()
