"""A parameter server, step by step: versions, staleness, and what an update is made of."""

import numpy as np
import pytest

from nnmpi.errors import CommError
from nnmpi.optim.adam import Adam
from nnmpi.optim.sgd import SGD
from nnmpi.parallel.server.parameter_server import ParameterServer, Push, Reply
from nnmpi.parallel.server.shards import cut_shards
from nnmpi.synchrony.consistency import ConsistencyController, Task
from nnmpi.tensor.flat import FlatStorage
from nnmpi.tensor.parameter import Parameter

LR = 0.5


class Server:
    """A server of two weights, whose workers get tasks of batches of 4 rows and push gradients of ones."""

    def __init__(
        self, workers: int, bound: int | None, optimizer: str = "sgd", dtype: str = "float64", **options: object
    ) -> None:
        parameter = Parameter((2,), lambda generator, shape: np.zeros(shape))
        self.storage = FlatStorage({"w": parameter}, {"w": np.zeros(2, dtype)}, np.zeros)
        self.given = SGD(self.storage, 0.1) if optimizer == "sgd" else Adam(self.storage, 0.1)
        (shard,) = cut_shards(self.storage, 1)
        self.server = ParameterServer(
            shard, self.storage, self.given, ConsistencyController(workers), workers, **options
        )  # type: ignore[arg-type]
        self.server.open(0, 100, bound)
        self.replies: dict[int, Reply] = {}
        self.release()

    @property
    def weight(self) -> float:
        """The first weight."""
        return float(self.server.master[0][0])

    def release(self) -> list[int]:
        """Return who may go on."""
        replies = self.server.release()
        self.replies |= {reply.worker: reply for reply in replies}
        return [reply.worker for reply in replies]

    def push(self, worker: int, gradient: float = 1.0, rows: int = 2, of: int = 4, lr: float = LR) -> None:
        """Let a worker push a gradient of equal numbers."""
        reply = self.replies[worker]
        assert reply.task is not None
        push = Push(reply.task, rows, rows, of, lr, reply.version, 0.0, 0.0, 0.0, 0.0, 0.0)
        self.server.push(worker, push, [np.full_like(self.storage.data[0], gradient)])

    def play(self, workers: str) -> list[list[int]]:
        """Let workers push one after the other, and return who may go on after each."""
        found = []
        for worker in workers:
            self.push(int(worker))
            found.append(self.release())
        return found


def test_asp_with_two_workers() -> None:
    """Every push is an update, and is as stale as there were updates since its worker pulled."""
    server = Server(2, None)
    assert server.play("00100111") == [[int(worker)] for worker in "00100111"]
    assert server.server.version == 8
    #  worker 0: pulled 0, 1, 2, 4; used at 0, 1, 3, 4      worker 1: pulled 0, 3, 6, 7; used at 2, 5, 6, 7
    assert server.server.staleness.histogram(0) == {0: 3, 1: 1}
    assert server.server.staleness.histogram(1) == {0: 2, 2: 2}


def test_asp_with_three_workers_in_turn() -> None:
    """After the first round the staleness of equal workers is N - 1."""
    server = Server(3, None)
    server.play("012012012")
    assert [server.server.staleness.histogram(worker) for worker in range(3)] == [{0: 1, 2: 2}, {1: 1, 2: 2}, {2: 3}]


def test_ssp_with_two_workers() -> None:
    """With a bound of 1 a worker waits with its second gradient for the other's first one, and both make an update."""
    server = Server(2, 1)
    assert server.play("00") == [[0], []]
    assert (server.server.version, server.weight) == (1, pytest.approx(-LR))
    assert server.play("1") == [[0, 1]]
    assert (server.server.version, server.weight) == (2, pytest.approx(-3 * LR))
    assert server.server.staleness.histogram(0) == {0: 2}
    assert server.server.staleness.histogram(1) == {1: 1}
    assert [server.replies[worker].slowest for worker in (0, 1)] == [1, 1]


def test_ssp_with_three_workers() -> None:
    """Whoever waits is let go by the slowest, not by the others."""
    server = Server(3, 1)
    assert server.play("00112") == [[0], [], [1], [], [0, 1, 2]]
    assert server.server.controller.clocks.steps == [2, 2, 1]
    # updates: worker 0's first; its second and worker 1's first; worker 1's second and worker 2's first
    assert server.server.version == 3
    assert [server.server.staleness.histogram(worker) for worker in range(3)] == [{0: 2}, {0: 1, 1: 1}, {2: 1}]


def test_bsp_makes_one_update_of_a_batch() -> None:
    """Nobody goes on before all have pushed; the rate is exactly the batch's."""
    server = Server(10, 0)
    for worker in (3, 1, 4, 0, 5, 9, 2, 6, 8):
        server.push(worker, rows=1, of=10, lr=0.3)
        assert server.release() == []
        assert server.weight == 0
    server.push(7, rows=1, of=10, lr=0.3)
    assert server.release() == list(range(10))
    assert server.server.optimizer.lr == 0.3  # ten times 0.1 added up is not 1.0
    assert server.server.version == server.server.updates == 1
    assert server.server.staleness.histogram() == {0: 10}


def test_an_update_of_a_part_has_a_mean_gradient_and_a_part_of_the_rate() -> None:
    """Adam sees a gradient of the right size, and makes a step of the right length."""
    server = Server(2, None, optimizer="adam")
    server.push(0, gradient=3.0, rows=1, of=4)
    server.release()
    assert server.server.optimizer.lr == LR / 4
    (m,) = server.server.optimizer.slots()["m"]
    np.testing.assert_allclose(m, 0.1 * 3.0 * 4)
    assert server.weight == pytest.approx(-LR / 4)


def test_shares_of_batches_of_different_lengths_and_rates() -> None:
    """2 of 4 rows and 1 of 2 are one batch together; the rate is the mean by shares."""
    server = Server(2, None)
    server.push(0, rows=2, of=4, lr=0.2)
    server.push(1, rows=1, of=2, lr=0.4)
    assert server.release() == [0, 1]
    assert server.server.optimizer.lr == pytest.approx(0.3)
    server.push(0, rows=3, of=4, lr=0.2)
    server.push(1, rows=1, of=4, lr=0.4)
    server.release()
    assert server.server.optimizer.lr == pytest.approx(0.25)


def test_a_part_without_rows_makes_no_update() -> None:
    """The worker goes on with the weights as they are; what it sent as a gradient is not looked at."""
    server = Server(2, None, optimizer="adam")
    server.push(0, gradient=np.nan, rows=0)
    assert server.release() == [0]
    assert (server.server.version, server.server.optimizer.steps, server.weight) == (0, 0, 0.0)
    server.push(0, gradient=np.nan, rows=0)
    server.push(1, gradient=1.0)
    server.release()
    assert (server.server.version, np.isfinite(server.weight)) == (1, True)


def test_stale_gradients_count_less() -> None:
    """f = min(1, (N - 1) / tau) of the gradient; of two in one update, each by its own."""
    server = Server(2, None, adapt=True)
    server.play("00")
    before = server.weight
    assert before == pytest.approx(-2 * LR)
    server.push(1, gradient=8.0)  # tau is 2, f is 1/2
    server.push(0, gradient=1.0)  # tau is 0
    server.release()
    assert server.weight == pytest.approx(before - LR * (8.0 / 2 + 1.0))
    assert server.server.optimizer.lr == pytest.approx(LR * (0.5 + 0.25))
    before = server.weight
    server.play("01")  # tau 0 and 1: N - 1 is not stale
    assert server.weight == pytest.approx(before - 2 * LR)


def test_without_it_they_count_as_much() -> None:
    """The same trace."""
    server = Server(2, None)
    server.play("00")
    server.push(1, gradient=8.0)
    server.push(0, gradient=1.0)
    server.release()
    assert server.weight == pytest.approx(-LR * (2 + 8 + 1))


def test_three_workers_stale_by_four() -> None:
    """(3 - 1) / 4 of the gradient, with the rate weighted in the same way."""
    server = Server(3, None, adapt=True)
    server.play("0101")
    before = server.weight
    server.push(2, gradient=6.0, rows=1, lr=0.8)
    server.push(0, gradient=1.0, rows=1, lr=0.2)
    server.release()
    # shares: 1/4 * 1/2 and 1/4, so the rate is (0.8 / 8 + 0.2 / 4) / (3 / 8) = 0.4, for 6 / 2 + 1
    assert server.weight == pytest.approx(before - 0.4 * 4.0)


def test_two_stale_gradients_in_one_update() -> None:
    """Both count by 2 / 3."""
    server = Server(3, None, adapt=True)
    server.play("000")
    before = server.weight
    server.push(2, gradient=3.0, rows=1)
    server.push(1, gradient=6.0, rows=1)
    server.release()
    assert server.weight == pytest.approx(before - LR * (2.0 + 4.0))


def test_the_rate_of_a_part_without_rows_does_not_count() -> None:
    """Not by a bit."""
    server = Server(3, None)
    server.push(0, rows=1, of=3, lr=0.3)
    server.push(1, rows=0, of=3, lr=0.7)
    server.push(2, rows=2, of=3, lr=0.3)
    server.release()
    assert server.server.optimizer.lr == 0.3


def test_nothing_is_assigned_after_a_broken_gradient() -> None:
    """It is over when all have come; their gradients are used, the broken one is not."""
    server = Server(3, None)
    push = Push(Task(0, 0), 2, 2, 4, LR, 0, 0.0, 0.0, 0.0, 0.0, 0.0, broken=True)
    server.server.push(0, push, None)
    assert server.release() == []
    server.push(2)
    assert server.release() == []
    server.push(1)
    assert server.release() == [0, 1, 2]
    assert all(reply.over and reply.task is None for reply in server.replies.values())
    assert server.weight == pytest.approx(-2 * LR)
    assert server.server.controller.over


def test_a_batch_that_was_begun_is_finished_after_a_signal() -> None:
    """Whoever got it."""
    server = Server(2, None)
    server.play("1")  # which begins batch 1
    push = Push(Task(0, 0), 2, 2, 4, LR, 0, 0.0, 0.0, 0.0, 0.0, 0.0, signal=15)
    server.server.push(0, push, [np.ones_like(server.storage.data[0])])
    assert server.release() == [0]
    assert server.replies[0].task == Task(1, 1)
    assert server.play("01") == [[], [0, 1]]
    assert server.server.controller.over


def test_the_number_of_steps_is_that_at_the_beginning_of_a_segment() -> None:
    """A state may be loaded after the server was made."""
    server = Server(2, 0, optimizer="adam")
    server.play("01")
    server.given.steps = 100
    server.server.open(1, 2, 0)
    server.release()
    server.play("01")
    assert server.server.optimizer.steps == 101


def test_a_gradient_that_is_too_old_is_refused() -> None:
    """More of the others' gradients than the bound allows between reading weights and using them."""
    server = Server(2, None)
    server.play("0000")
    server.server.controller.bound = 1
    with pytest.raises(CommError, match="worker 1's gradient is used after 4 of the others', more than 3"):
        server.play("1")


def test_a_gradient_of_who_was_not_told_to_go_on_is_refused() -> None:
    """A second one while the first one waits."""
    server = Server(2, 0)
    server.push(1)
    with pytest.raises(CommError, match="worker 1, which still waits"):
        server.push(1)


def test_the_storage_may_change_while_the_segment_runs() -> None:
    """The worker of the server's own rank computes there; the server's weights come back at the end."""
    server = Server(1, 0)
    server.storage.data[0][...] = 77.0
    server.push(0, rows=4)
    server.release()
    assert server.storage.data[0][0] == 77.0
    assert server.given.steps == 0
    server.server.close()
    assert server.storage.data[0][0] == -LR
    assert server.given.steps == 1


def test_counts_can_be_taken() -> None:
    """They begin anew then."""
    server = Server(2, None)
    server.play("01")
    assert server.server.take_staleness().histogram() == {0: 1, 1: 1}
    server.play("0")
    assert server.server.staleness.histogram() == {1: 1}


def test_a_worker_is_assigned_tasks_in_order() -> None:
    """Whoever is free gets the next part."""
    server = Server(2, None)
    server.play("1101")
    assert {worker: reply.task for worker, reply in server.replies.items()} == {0: Task(2, 0), 1: Task(2, 1)}


def test_the_dtype_stays() -> None:
    """Shares and weights are float64 numbers, but no array becomes one."""
    server = Server(2, None, optimizer="adam", dtype="float32", adapt=True)
    server.play("00")
    server.push(1, lr=np.float64(0.5))
    server.push(0, lr=np.float64(0.25))
    server.release()
    assert server.server.master[0].dtype == np.float32
    assert server.weight == pytest.approx(-LR - (0.5 / 4 + 0.25 / 2), rel=1e-5)  # Adam's step is the rate here


def test_replies_tell_of_a_signal() -> None:
    """That the server's rank got."""
    server = Server(2, None)
    server.play("0")
    server.server.signal = lambda: 15
    server.play("1")
    assert {worker: reply.signal for worker, reply in server.replies.items()} == {0: 0, 1: 15}
