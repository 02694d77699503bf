"""How long virtual workers take is what a formula says, and nobody gets further ahead than it may."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnmpi.comm.cost import parameter_server, ring_all_reduce
from nnmpi.comm.group import Group
from nnmpi.compose.trainer import Progress, Throttle
from nnmpi.compose.virtual import VirtualWorker
from nnmpi.parallel.server.shards import cut_shards
from nnmpi.synchrony.slowdown import Slowdown
from nnmpi.synchrony.sync import Sync
from tests.compose.virtual_runs import BATCH, BATCHES, ROWS, SPEED, build, make, optimizer_of, run, weights


def nbytes(worker: Any) -> int:
    return int(weights(worker.model).nbytes)


@pytest.mark.parametrize("servers", [1, 2, 4])
@pytest.mark.parametrize("dedicated", [False, True])
@pytest.mark.parametrize("factor", [1, 3])
def test_a_step_through_servers_takes_the_pace_and_what_the_formula_says(
    group: Group, servers: int, dedicated: bool, factor: int
) -> None:
    """With several servers the longest shard counts; a dedicated one has a message more."""
    sync = Sync("bsp", servers=servers, dedicated=dedicated)
    ranks = 4 + dedicated * servers
    worker = make(group, sync, network=SPEED, straggler=f"rank={ranks - 1},factor={factor}")
    reports = run(worker, 2)
    shards = [shard.nbytes(worker.model.storage.data) for shard in cut_shards(worker.model.storage, servers)]
    far = 4 if dedicated else 3  # a worker needs no messages to the server on its own rank
    comm_s = parameter_server(far + 1, max(shards), SPEED.alpha_s, SPEED.beta_s_per_byte)
    if factor > 1:  # the straggler comes last, when the link is free again: its bytes alone pass before the update
        comm_s = 2 * SPEED.alpha_s + (1 + far) * max(shards) * SPEED.beta_s_per_byte
    assert worker.now_s == pytest.approx(2 * BATCHES * (factor + comm_s), rel=1e-9)
    assert [report.messages for report in reports] == [2 * far * servers * BATCHES] * 2
    assert reports[0].bytes == 2 * far * nbytes(worker) * BATCHES
    assert all(report.totals.wall_s == pytest.approx(BATCHES * (factor + comm_s)) for report in reports)


@pytest.mark.parametrize("factor", [1, 3])
def test_a_step_with_an_all_reduce_takes_the_slowest_pace_and_a_ring(group: Group, factor: int) -> None:
    worker = make(group, Sync(), network=SPEED, straggler=f"rank=2,factor={factor}")
    (report,) = run(worker)
    ring_s = ring_all_reduce(4, nbytes(worker), SPEED.alpha_s, SPEED.beta_s_per_byte)
    assert worker.now_s == pytest.approx(BATCHES * (factor + ring_s), rel=1e-9)
    totals = report.totals
    assert totals.per_step(totals.compute_s) == pytest.approx((3 + factor) / 4)
    assert totals.per_step(totals.compute_s + totals.sync_s) == pytest.approx(factor + ring_s)
    assert (report.messages, report.bytes) == (BATCHES * 2 * 3 * 4, BATCHES * 2 * 3 * nbytes(worker))


@pytest.mark.parametrize("every", [1, 2, 3])
def test_local_steps_pay_the_ring_once_in_so_many(group: Group, every: int) -> None:
    worker = make(group, Sync("local", local_steps=every), network=SPEED)
    (report,) = run(worker)
    ring_s = ring_all_reduce(4, nbytes(worker), SPEED.alpha_s, SPEED.beta_s_per_byte)
    assert worker.now_s == pytest.approx(BATCHES * (1 + ring_s / every), rel=1e-9)
    assert report.messages == BATCHES // every * 2 * 3 * 4
    assert report.staleness is not None and report.staleness.largest() == every - 1


def test_a_meeting_between_two_averages_costs_one(group: Group) -> None:
    worker = make(group, Sync("local", local_steps=4), network=SPEED)
    (report,) = run(worker)
    ring_s = ring_all_reduce(4, nbytes(worker), SPEED.alpha_s, SPEED.beta_s_per_byte)
    assert worker.now_s == pytest.approx(BATCHES + 2 * ring_s) and report.disagreement > 0


@pytest.mark.parametrize("workers", [2, 5])
@pytest.mark.parametrize("neighbours", ["ring", "random"])
def test_gossip_pays_for_its_neighbours_alone(group: Group, neighbours: str, workers: int) -> None:
    worker = make(group, Sync("gossip", neighbours=neighbours), workers, network=SPEED)
    (report,) = run(worker)
    message_s = SPEED.seconds(nbytes(worker))
    ring_s = ring_all_reduce(workers, nbytes(worker), SPEED.alpha_s, SPEED.beta_s_per_byte)
    talks = min(workers - 1, 2) if neighbours == "ring" else 1
    ring_s = ring_s if workers > 2 else 0.0  # two agree after every step, and need no meeting
    most_s = BATCHES * (1 + talks * message_s) + ring_s
    if neighbours == "ring" or workers == 2:
        assert worker.now_s == pytest.approx(most_s, rel=1e-9)
    else:  # one is left out each time, and has its step earlier; the others may wait for it or not
        assert BATCHES + ring_s < worker.now_s <= most_s * (1 + 1e-12)
    sent = workers * talks - (neighbours == "random") * workers % 2
    assert report.messages == BATCHES * sent + (2 * workers * (workers - 1) if workers > 2 else 0)
    assert report.staleness is None and (report.disagreement > 0) == (workers > 2)


def test_a_straggler_slows_gossip_down_no_faster_than_word_of_it_spreads(group: Group) -> None:
    """On a ring of 16, after 6 steps only those within 6 places of it have waited."""
    worker = make(group, Sync("gossip"), 16, straggler="rank=0,factor=3")
    told: list[Progress] = []
    run(worker, progress=told.append)
    last = {each.worker: each.at_s for each in told if each.batch == BATCHES - 1}
    assert [last[number] for number in range(16)] == [
        BATCHES + 2 * max(BATCHES - min(number, 16 - number), 0) for number in range(16)
    ]


@pytest.mark.parametrize("factor", [2, 8])
def test_asp_has_the_throughput_of_all_its_workers(group: Group, factor: int) -> None:
    """In the long run (N - 1 + 1/f) / N of what equal workers do, if messages take no time."""
    rows, workers = 100 * BATCH, 4
    slow = make(group, Sync("asp"), workers, straggler=f"rank=1,factor={factor}")
    equal = make(group, Sync("asp"), workers)
    counts = Counter[int]()
    run(slow, rows=rows, progress=lambda each: counts.update([each.worker]))
    run(equal, rows=rows)
    assert equal.now_s == 100
    assert equal.now_s / slow.now_s == pytest.approx((workers - 1 + 1 / factor) / workers, rel=0.03)
    assert sum(counts.values()) == 400 and counts[0] / counts[1] == pytest.approx(factor, rel=0.1)


def test_staleness_of_equal_asp_workers_is_the_number_of_the_others(group: Group) -> None:
    worker = make(group, Sync("asp"), 5)
    (report,) = run(worker, rows=40 * BATCH)
    assert report.staleness is not None
    assert report.staleness.mean() == pytest.approx(4, rel=0.03) and report.staleness.largest() == 4
    assert report.staleness.count() == 40 * 5
    assert report.updates == 40 * 5


def test_a_stale_synchronous_run_waits_for_a_straggler_in_the_end(group: Group) -> None:
    """At any moment nobody is more than S steps ahead, so that in the long run all go at its pace."""
    worker = make(group, Sync("ssp", staleness=2), straggler="rank=1,factor=4")
    done, leads = [0] * 4, []

    def note(each: Progress) -> None:
        done[each.worker] += 1
        leads.append(max(done) - min(done))

    (report,) = run(worker, rows=50 * BATCH, progress=note)
    assert report.lead == 2 and max(leads) == 3  # done: S ahead when begun, and one more
    assert report.totals.wall_s == pytest.approx(50 * 4, rel=0.06)


@settings(max_examples=25)
@given(
    st.integers(0, 3),
    st.integers(1, 6),
    st.integers(1, 3),
    st.lists(st.sampled_from([1, 1.5, 2, 3.7]), min_size=6, max_size=6),
    st.integers(0, 3),
)
def test_the_bound_holds_for_any_speeds_and_every_part_is_done_once(
    group: Group, bound: int, workers: int, servers: int, factors: list[float], seed: int
) -> None:
    rules = [f"rank={rank},factor={factor}" for rank, factor in enumerate(factors[:workers])]
    slowdown = Slowdown.parse(";".join([*rules, "random,probability=0.3,factor=4"]), seed)
    model = build("float32")
    sync = Sync("ssp", staleness=bound, servers=min(servers, workers))
    throttle = Throttle(0.5, slowdown)
    worker = VirtualWorker(model, optimizer_of(model), group, sync, workers, throttle=throttle, network=SPEED)
    rows, steps, leads = list[tuple[int, int]](), [0] * workers, [0]

    def note(each: Progress) -> None:
        rows.append((each.batch, each.totals.samples))
        steps[each.worker] += 1
        leads.append(max(steps) - min(steps) - 1)

    reports = run(worker, 2, progress=note)
    assert max(leads) <= bound and max(report.lead for report in reports) <= bound
    expected = [(number, min(BATCH, ROWS - number * BATCH)) for number in range(BATCHES)] * 2
    done = Counter[int]()
    for number, count in rows:
        done[number] += count
    assert len(rows) == 2 * BATCHES * workers
    assert done == Counter({number: 2 * count for number, count in expected})
    assert [report.totals.samples for report in reports] == [ROWS] * 2


def test_backup_workers_save_the_time_of_the_slowest(group: Group) -> None:
    worker = make(group, Sync("bsp", backup=1), straggler="rank=3,factor=2.5")
    used = Counter[int]()
    (report,) = run(worker, rows=60, progress=lambda each: used.update([each.worker]))
    assert worker.now_s < 5 * 2.5
    assert report.dropped + report.unassigned == 5 and report.dropped > 0
    assert sum(used.values()) == 15 and report.updates == 5 and report.totals.samples == 45


def test_dedicated_servers_have_the_first_ranks(group: Group) -> None:
    worker = make(group, Sync("asp", dedicated=True), 3, straggler="rank=3,factor=50")
    done = Counter[int]()
    run(worker, progress=lambda each: done.update([each.worker]))
    assert min(done, key=lambda number: done[number]) == 2


def test_the_lead_does_not_depend_on_the_number_of_servers(group: Group) -> None:
    """Others than the first one let workers go on for whom nothing is left to do: these begin no step."""
    reports = [run(make(group, Sync("asp", servers=servers), straggler="rank=3,factor=10"))[0] for servers in (1, 2, 3)]
    assert len({report.lead for report in reports}) == 1
    assert len({report.updates for report in reports}) == 1
