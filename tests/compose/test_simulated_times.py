"""How long training takes on simulated ranks with links of known speed is what a formula says."""

from collections import Counter
from dataclasses import dataclass

import pytest

from nnmpi import clock
from nnmpi.comm.cost import parameter_server, ring_all_reduce
from nnmpi.comm.group import Group
from nnmpi.comm.machine import Link, Machine
from nnmpi.comm.simulated.simulated_world import simulate
from nnmpi.compose.asynchronous import AsynchronousWorker
from nnmpi.compose.options import GradientExchange
from nnmpi.compose.trainer import Progress, SegmentReport, Throttle, Trainer
from nnmpi.compose.worker import Worker
from nnmpi.data.loader import Loader
from nnmpi.parallel.server.shards import cut_shards
from nnmpi.parallel.server.wire_format import HEADER_BYTES
from nnmpi.synchrony.slowdown import Slowdown
from nnmpi.synchrony.sync import Sync
from tests.compose.small_runs import BATCH, build, dataset, optimizer_of

PACE_S = 0.002  # short, so that ranks do not ask one another for signals: they do so ten times a second at most
ALPHA_S, BYTE_S = 0.01, 1e-5  # of a pace
NBYTES = 8 * build().storage.size


@dataclass
class Seen:
    """What came of a run: its report, what rank 0 was told, and when each rank began each step; times in paces."""

    report: SegmentReport
    told: list[Progress]
    began_s: list[list[float]]

    @property
    def paces(self) -> float:
        return self.report.totals.wall_s / PACE_S


def run(sync: Sync, batches: int, ranks: int = 4, slow: str = "", links: bool = True, seed: int = 0) -> Seen:
    """Train one segment."""

    def main(group: Group) -> tuple[SegmentReport, list[Progress], list[float]]:
        model, throttle = build(), Throttle(PACE_S, Slowdown.parse(slow, seed=7))
        optimizer, trainer = optimizer_of(model), None
        if sync.asynchronous:
            trainer = AsynchronousWorker(model, optimizer, group, sync, throttle=throttle)
        else:
            exchange = GradientExchange(allreduce="ring", overlap=False)
            trainer = Worker(model, optimizer, group, exchange=exchange, throttle=throttle)
        assert isinstance(trainer, Trainer)
        data = dataset(batches * BATCH)
        loader = Loader(data, BATCH, rank=group.rank, world=group.size, dtype="float64", workers=0)
        told, began_s = list[Progress](), list[float]()

        def rate(step: int) -> float:
            began_s.append(clock.now() / PACE_S)
            return 0.1

        report = trainer.run(loader, 0, 0, batches, 0, rate, progress=told.append)
        trainer.release()
        return report, told, began_s

    link = Link.line(PACE_S * ALPHA_S, PACE_S * BYTE_S)
    machine = Machine(link, link, tuple(range(ranks))) if links else None
    found = simulate(main, ranks, machine, seed, cpu_factor=0)
    return Seen(found[0][0], found[0][1], [began_s for _, _, began_s in found])


def step(sync: Sync, ranks: int = 4, slow: str = "", few: int = 4, more: int = 12) -> float:
    """Return the paces of a step, without what begins and ends a segment."""
    return (run(sync, more, ranks, slow).paces - run(sync, few, ranks, slow).paces) / (more - few)


@pytest.mark.parametrize("servers", [1, 2, 4])
@pytest.mark.parametrize("dedicated", [False, True])
@pytest.mark.parametrize("factor", [1, 3])
def test_a_step_through_servers_takes_the_pace_and_what_the_formula_says(
    servers: int, dedicated: bool, factor: int
) -> None:
    """With several servers the longest shard counts, or a worker's own link; a dedicated one has a message more."""
    ranks = 4 + dedicated * servers
    found = step(Sync("bsp", servers=servers, dedicated=dedicated), ranks, f"rank={ranks - 1},factor={factor}")
    storage = build().storage
    shards = [shard.nbytes(storage.data) + HEADER_BYTES for shard in cut_shards(storage, servers)]
    far = 4 if dedicated else 3  # a worker needs no messages to the server on its own rank
    together_s = parameter_server(far + 1, max(shards), ALPHA_S, BYTE_S)
    if factor > 1:  # the straggler comes last, when the links are free again: its bytes alone pass before the update
        through_s = max(max(shards), sum(shards)) * BYTE_S
        together_s = 2 * ALPHA_S + through_s + max(far * max(shards), sum(shards)) * BYTE_S
    assert found == pytest.approx(factor + together_s, rel=0.003)


@pytest.mark.parametrize("factor", [1, 3])
def test_a_step_with_an_all_reduce_takes_the_slowest_pace_a_ring_and_the_report(factor: int) -> None:
    numbers_s = 2 * (ALPHA_S + 5 * 8 * BYTE_S)  # loss, right answers, rows and a hash of the update, by doubling
    ring_s = ring_all_reduce(4, NBYTES, ALPHA_S, BYTE_S)
    assert step(Sync(), slow=f"rank=2,factor={factor}") == pytest.approx(factor + ring_s + numbers_s, rel=0.002)


@pytest.mark.parametrize("every", [2, 4])
def test_local_steps_pay_an_average_once_in_so_many(every: int) -> None:
    """A ring, and before it the ranks' rows."""
    ring_s, rows_s = ring_all_reduce(4, NBYTES, ALPHA_S, BYTE_S), 2 * (ALPHA_S + 8 * BYTE_S)
    found = step(Sync("local", local_steps=every))
    assert found == pytest.approx(1 + (ring_s + rows_s) / every, abs=0.02)  # now and then they ask for signals
    report = run(Sync("local", local_steps=every), 8).report
    assert report.staleness is not None and report.staleness.largest() == every - 1


@pytest.mark.parametrize("ranks", [2, 5, 6])
@pytest.mark.parametrize("neighbours", ["ring", "random"])
def test_gossip_pays_for_its_neighbours_alone(neighbours: str, ranks: int) -> None:
    talks = min(ranks - 1, 2) if neighbours == "ring" else 1
    found = step(Sync("gossip", neighbours=neighbours), ranks)
    least, most = 1 + ALPHA_S + talks * NBYTES * BYTE_S, 1 + talks * (ALPHA_S + NBYTES * BYTE_S)
    # At random an odd one is left out each time, and has its step earlier; the others may wait for it or not.
    least = 1.0 if neighbours == "random" and ranks % 2 else least
    assert least - 1e-3 <= found <= most + 0.02


def test_a_straggler_slows_gossip_down_no_faster_than_word_of_it_spreads() -> None:
    """On a ring of 16 one place further with each step, after the first, at which all ask whether there is a signal."""
    steps = 6
    began = run(Sync("gossip"), steps, 16, "rank=0,factor=3", links=False).began_s
    for rank in range(16):
        away = max(0, min(rank, 16 - rank) - 1)
        expected = [step + 2 * max(0, step - away) for step in range(steps - 1)]
        assert began[rank] == pytest.approx([0, *(3 + each for each in expected)], abs=0.01)


@pytest.mark.parametrize("factor", [2, 8])
def test_asp_has_the_throughput_of_all_its_workers(factor: int) -> None:
    """In the long run (N - 1 + 1/f) / N of what equal workers do, if messages take no time."""
    batches, workers = 100, 4
    slow = run(Sync("asp"), batches, workers, f"rank=1,factor={factor}", links=False)
    equal = run(Sync("asp"), batches, workers, links=False)
    counts = Counter(each.worker for each in slow.told)
    assert equal.paces == pytest.approx(batches, abs=0.2)
    assert equal.paces / slow.paces == pytest.approx((workers - 1 + 1 / factor) / workers, rel=0.03)
    assert counts.total() == batches * workers and counts[0] / counts[1] == pytest.approx(factor, rel=0.1)


@pytest.mark.parametrize("seed", range(3))
def test_staleness_of_equal_asp_workers_is_the_number_of_the_others(seed: int) -> None:
    report = run(Sync("asp"), 40, 5, links=False, seed=seed).report
    assert report.staleness is not None
    assert report.staleness.mean() == pytest.approx(4, rel=0.03)
    assert report.staleness.count() == report.updates == 40 * 5


@pytest.mark.parametrize("bound", [0, 2, 5])
def test_a_stale_synchronous_run_goes_at_the_pace_of_a_straggler_in_the_end(bound: int) -> None:
    """At any moment nobody is more than S steps ahead."""
    found = run(Sync("ssp", staleness=bound), 50, slow="rank=1,factor=4", links=False)
    done, leads = [0] * 4, []
    for each in found.told:
        done[each.worker] += 1
        leads.append(max(done) - min(done))
    assert found.report.lead == bound and max(leads) == bound + 1  # done: S ahead when begun, and one more
    assert 4 * (49 - bound) - 1 < found.paces < 4 * 50 + 1


def test_backup_workers_save_the_time_of_the_slowest() -> None:
    found = run(Sync("bsp", backup=1), 5, slow="rank=3,factor=2.5", links=False)
    report = found.report
    assert found.paces < 5 * 2.5
    assert report.dropped + report.unassigned == 5 and report.dropped > 0
    assert len(found.told) == 15 and report.updates == 5 and report.totals.samples == 45


def test_dedicated_servers_have_the_first_ranks() -> None:
    found = run(Sync("asp", dedicated=True), 6, 4, "rank=3,factor=50", links=False)
    counts = Counter(each.worker for each in found.told)
    assert min(range(3), key=lambda worker: counts[worker]) == 2


def test_the_lead_does_not_depend_on_the_number_of_servers() -> None:
    """Others than the first one let workers go on for whom nothing is left to do: these begin no step."""
    reports = [run(Sync("asp", servers=count), 6, slow="rank=3,factor=10", links=False).report for count in (1, 2, 3)]
    assert len({report.lead for report in reports}) == 1
    assert len({report.updates for report in reports}) == 1
