"""How long training takes on simulated ranks with links of known speed is what a formula says."""

from collections import Counter
from dataclasses import dataclass, fields

import pytest

from nnmpi import AsynchronousWorker, GradientExchange, Sync, Worker, simulate
from nnmpi.asynchronous.server import Push
from nnmpi.base import clock
from nnmpi.comm.algorithms.registry import ALGORITHMS
from nnmpi.comm.duration import price
from nnmpi.comm.machine import Link, Machine
from nnmpi.comm.synchrony.slow import Slow
from nnmpi.compose.trainer import Progress, SegmentReport, Trainer
from nnmpi.data import Loader
from tests.compose.small_runs import BATCH, build, dataset, optimizer_of

# short, so that ranks do not ask one another for signals: they do so ten times a second at most
PACE_S = 0.002
ALPHA_S, BYTE_S = 0.01, 1e-5  # of a pace
NBYTES = 8 * build().storage.size
RING_S = price(ALGORITHMS["ring"], 4, NBYTES, Machine.uniform(ALPHA_S, BYTE_S))


@dataclass
class Seen:
    """What came of a run: its report, what rank 0 was told, and when each rank began each step;
    times in paces.
    """

    report: SegmentReport
    told: list[Progress]
    began_s: list[list[float]]

    @property
    def paces(self):
        return self.report.totals.wall_s / PACE_S


def run(sync, batches, ranks=4, slow="", links=True, seed=0):
    """Train one segment."""

    def main(group):
        model, slowness = build(), Slow.parse(f"ms={1e3 * PACE_S};{slow}".rstrip(";"), seed=7)
        optimizer, trainer = optimizer_of(model), None
        if sync.asynchronous:
            trainer = AsynchronousWorker(model, optimizer, group, sync, slow=slowness)
        else:
            exchange = GradientExchange(allreduce="ring", overlap=False)
            trainer = Worker(model, optimizer, group, exchange=exchange, slow=slowness)
        assert isinstance(trainer, Trainer)
        data = dataset(batches * BATCH)
        loader = Loader(data, BATCH, group, dtype="float64", workers=0)
        text, began_s = [], []

        def rate(step):
            began_s.append(clock.now() / PACE_S)
            return 0.1

        report = trainer.run(loader, 0, 0, batches, 0, rate, progress=text.append)
        trainer.release()
        return report, text, began_s

    link = Link.line(PACE_S * ALPHA_S, PACE_S * BYTE_S)
    machine = Machine(link, link, tuple(range(ranks))) if links else None
    result = simulate(main, ranks, machine, seed, cpu_factor=0)
    return Seen(result[0][0], result[0][1], [began_s for _, _, began_s in result])


def step(sync, ranks=4, slow="", few=4, more=12):
    """Return the paces of a step, without what begins and ends a segment."""
    return (run(sync, more, ranks, slow).paces - run(sync, few, ranks, slow).paces) / (more - few)


@pytest.mark.parametrize("factor", [1, 3])
def test_a_step_through_the_server_takes_the_pace_and_what_the_formula_says(factor):
    nbytes = NBYTES + 8 * len(fields(Push))  # the header; a reply's is shorter
    together_s = 2 * ALPHA_S + 2 * 3 * nbytes * BYTE_S
    if factor > 1:
        # the straggler comes last, when the links are free again: its bytes alone pass before the
        # update
        together_s = 2 * ALPHA_S + 4 * nbytes * BYTE_S
    assert step(Sync("ssp", staleness=0), 4, f"rank=3,factor={factor}") == pytest.approx(
        factor + together_s, rel=0.01
    )


@pytest.mark.parametrize("who, factor", [(0, 1), (0, 3), (2, 3)])
def test_a_step_with_an_all_reduce_takes_the_slowest_pace_a_ring_and_the_report(who, factor):
    """Whoever is slow: all meet in the same step, which ends for all at the same time."""
    # loss, right answers, rows and a hash of the update, by doubling
    numbers_s = 2 * (ALPHA_S + 5 * 8 * BYTE_S)
    # between steps that the ranks compare
    result = step(Sync(), slow=f"rank={who},factor={factor}", few=8, more=15)
    assert result == pytest.approx(factor + RING_S + numbers_s, rel=0.002)


@pytest.mark.parametrize("every", [2, 4])
def test_local_steps_pay_an_average_once_in_so_many(every):
    """A ring, and before it the ranks' rows."""
    rows_s = 2 * (ALPHA_S + 8 * BYTE_S)
    result = step(Sync("local", local_steps=every))
    # now and then they ask for signals
    assert result == pytest.approx(1 + (RING_S + rows_s) / every, abs=0.02)
    report = run(Sync("local", local_steps=every), 8).report
    assert report.staleness is not None and report.staleness.largest() == every - 1


@pytest.mark.parametrize("ranks", [2, 5])
def test_gossip_pays_for_its_neighbours_alone(ranks):
    talks = min(ranks - 1, 2)
    result = step(Sync("gossip"), ranks)
    assert (
        1 + ALPHA_S + talks * NBYTES * BYTE_S - 1e-3
        <= result
        <= 1 + talks * (ALPHA_S + NBYTES * BYTE_S) + 0.02
    )


def test_a_straggler_slows_gossip_down_no_faster_than_word_of_it_spreads():
    """On a ring of 16 one place further with each step, after the first, at which all ask whether
    there is a signal.
    """
    steps = 6
    began = run(Sync("gossip"), steps, 16, "rank=0,factor=3", links=False).began_s
    for rank in range(16):
        away = max(0, min(rank, 16 - rank) - 1)
        expected = [step + 2 * max(0, step - away) for step in range(steps - 1)]
        assert began[rank] == pytest.approx([0, *(3 + item for item in expected)], abs=0.01)


@pytest.mark.parametrize("factor", [8])
def test_asp_has_the_throughput_of_all_its_workers(factor):
    """In the long run (N - 1 + 1/f) / N of what equal workers do, if messages take no time."""
    batches, workers = 100, 4
    slow = run(Sync("asp"), batches, workers, f"rank=1,factor={factor}", links=False)
    equal = run(Sync("asp"), batches, workers, links=False)
    counts = Counter(item.worker for item in slow.told)
    assert equal.paces == pytest.approx(batches, abs=0.2)
    assert equal.paces / slow.paces == pytest.approx((workers - 1 + 1 / factor) / workers, rel=0.03)
    assert counts.total() == batches * workers and counts[0] / counts[1] == pytest.approx(
        factor, rel=0.1
    )


@pytest.mark.parametrize("seed", range(2))
def test_staleness_of_equal_asp_workers_is_the_number_of_the_others(seed):
    report = run(Sync("asp"), 40, 5, links=False, seed=seed).report
    assert report.staleness.mean() == pytest.approx(4, rel=0.03)
    assert report.staleness.total.total() == 40 * 5 >= report.updates > 39 * 5


@pytest.mark.parametrize("bound", [0, 2, 5])
def test_a_stale_synchronous_run_goes_at_the_pace_of_a_straggler_in_the_end(bound):
    """At any moment nobody is more than S steps ahead."""
    result = run(Sync("ssp", staleness=bound), 50, slow="rank=1,factor=4", links=False)
    done, leads = [0] * 4, []
    for item in result.told:
        done[item.worker] += 1
        leads.append(max(done) - min(done))
    # done: S ahead when begun, and one more
    assert result.report.lead == bound and max(leads) == bound + 1
    assert 4 * (49 - bound) - 1 < result.paces < 4 * 50 + 1
