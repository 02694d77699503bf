"""Push and pull over MPI: in step equal to sequence, out of step every task once, ends properly, faults are seen."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nnmpi.backend.backend import numpy_backend
from nnmpi.comm import point_to_point
from nnmpi.comm.group import Group
from nnmpi.errors import CommError
from nnmpi.nn.module import Module
from nnmpi.parallel.server.parameter_server import ParameterServer, Push, Reply
from nnmpi.parallel.server.push_pull import PushPull
from nnmpi.parallel.server.shards import cut_shards
from nnmpi.parallel.server.wire_format import HEADER_BYTES
from nnmpi.synchrony.sync import Sync
from tests.device.library import device_backend
from tests.parallel.server.rounds import (
    all_equal,
    gradient_of,
    make,
    new_model,
    no_delay,
    random_delay,
    rate_of,
    rows_of,
    serial_weights,
    skip_unless_fitting,
    tasks,
    train,
)

IN_STEP = [
    Sync("bsp", servers=1),
    Sync("bsp", servers=2),
    Sync("ssp", staleness=0, servers=3),
    Sync("bsp", servers=1, dedicated=True),
    Sync("bsp", servers=2, dedicated=True),
]
OUT_OF_STEP = [
    Sync("ssp", staleness=1),
    Sync("ssp", staleness=3),
    Sync("asp"),
    Sync("asp", adapt=True),
    Sync("ssp", staleness=1, servers=2),
    Sync("ssp", staleness=2, servers=3),
    Sync("asp", servers=2),
    Sync("ssp", staleness=1, dedicated=True),
    Sync("asp", servers=2, dedicated=True),
]
SEGMENTS = ((0, 3), (3, 4), (4, 4), (4, 6))


def name_of(sync: Sync) -> str:
    """Return a short name for a test."""
    text = f"{sync.mode}{sync.bound if sync.mode == 'ssp' else ''}-{sync.server_count}"
    return text + "d" * sync.dedicated + "a" * sync.adapt


@pytest.mark.simulated
@pytest.mark.parametrize("synchronous_sends", [False, True], ids=["buffered", "synchronous"])
@pytest.mark.parametrize("sync", IN_STEP, ids=name_of)
def test_in_step_it_is_the_serial_run(group: Group, sync: Sync, synchronous_sends: bool) -> None:
    """However slow the ranks are, the weights are the same bits, and those of whole batches but for rounding."""
    skip_unless_fitting(group, sync)
    runs = [
        train(group, sync, SEGMENTS, delay, synchronous_sends=synchronous_sends)
        for delay in (no_delay, random_delay(1), random_delay(2))
    ]
    expected = serial_weights(6)
    for run in runs:
        assert all_equal(group, run)
        near = [np.allclose(a, b, rtol=1e-11, atol=1e-13) for a, b in zip(run.weights, expected, strict=True)]
        assert all(group.gather(all(near)))
    assert all(group.gather(len({run.digest for run in runs}) == 1))
    updates = [stop - first for first, stop in SEGMENTS]
    assert all(group.gather(not run.updates or run.updates == updates) for run in runs)


@pytest.mark.simulated
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("sync", OUT_OF_STEP, ids=name_of)
def test_every_task_is_used_once_and_nobody_is_too_far_ahead(group: Group, sync: Sync, seed: int) -> None:
    """With sleeps that change from step to step, through several segments, one of them empty."""
    skip_unless_fitting(group, sync)
    run = train(group, sync, SEGMENTS, random_delay(seed), synchronous_sends=seed == 1)
    assert all_equal(group, run)
    workers = len(sync.worker_ranks(group.size))
    if group.rank == 0:
        found = [sorted(task for _, task in segment) for segment in run.arrivals]
        good = found == [tasks(segment, workers) for segment in SEGMENTS]
        good = good and (sync.bound is None or max(run.leads) <= sync.bound)
    else:
        good = not any(run.arrivals)
    assert all(group.gather(good))
    changed = [
        float(np.abs(array - before).max()) for array, before in zip(run.weights, serial_weights(0), strict=True)
    ]
    assert all(group.gather(max(changed) > 1e-3))


@pytest.mark.simulated
@pytest.mark.parametrize("sync", [sync for sync in OUT_OF_STEP if sync.bound is None], ids=name_of)
def test_without_a_bound_every_gradient_is_an_update_on_every_server(group: Group, sync: Sync) -> None:
    """In short segments, too: so the servers agree how many steps their optimizers have done."""
    skip_unless_fitting(group, sync)
    segments = ((0, 1), (1, 2), (2, 5))
    updates = train(group, sync, segments, random_delay(3)).updates
    workers = len(sync.worker_ranks(group.size))
    expected = [sum(min(rows_of(batch), workers) for batch in range(*segment)) for segment in segments]
    wanted = expected if group.rank in sync.server_ranks(group.size) else []
    assert all(group.gather(updates == wanted))


@pytest.mark.simulated
@pytest.mark.parametrize("limit", [100_000, 3_000_000])
@pytest.mark.parametrize("sync", [Sync("bsp", servers=1), Sync("bsp", servers=2)], ids=name_of)
def test_long_messages_do_not_overtake_one_another(
    group: Group, sync: Sync, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages that no MPI buffers, whole and in pieces."""
    skip_unless_fitting(group, sync)
    monkeypatch.setattr(point_to_point, "MAX_MESSAGE_BYTES", limit)
    run = train(group, sync, ((0, 4),), random_delay(5), hidden=9000)
    assert all_equal(group, run)
    near = [np.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(run.weights, serial_weights(4, 9000), strict=True)]
    assert all(group.gather(all(near)))


@pytest.mark.simulated(min_size=2)
def test_a_worker_sleeps_while_it_waits(group: Group) -> None:
    """For a worker that takes 0.3 s more; servers that compute as well do, too."""

    def slow(rank: int, step: int) -> float:
        return 0.3 if rank == group.size - 1 else 0.0

    run = train(group, Sync("bsp", servers=1), ((0, 1),), slow)
    assert all(group.gather(run.waiting_s < 0.1)), group.gather(run.waiting_s)


@pytest.mark.mpi(min_size=2)
def test_a_slow_worker_holds_up_the_others_only_up_to_the_bound(group: Group) -> None:
    """Without a bound the others leave it behind: so the leads that the other test looks at can be too large."""

    def slow(rank: int, step: int) -> float:
        return 0.03 if rank == group.size - 1 else 0.0

    leads, steps = [], []
    for sync in (Sync("asp"), Sync("ssp", staleness=1)):
        run = train(group, sync, ((0, 6),), slow)
        leads.append(group.share(max(run.leads, default=0)))
        steps.append(group.gather(len(run.pulls[0]) - 1))
    assert leads[0] > 1 and leads[1] == 1, leads
    assert sum(steps[0]) == sum(steps[1]) == 6 * group.size
    assert steps[0][-1] < 6, steps


@pytest.mark.simulated
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("end", ["signal", "broken"])
@pytest.mark.parametrize(
    "sync",
    [Sync("bsp", servers=2), Sync("ssp", staleness=1), Sync("ssp", staleness=2, servers=3), Sync("asp", servers=2)],
    ids=name_of,
)
def test_a_segment_that_ends_early_ends_for_everybody(group: Group, sync: Sync, end: str, seed: int) -> None:
    """At a random step of one worker: what was assigned arrives, a signal ends a whole batch, the next one works."""
    skip_unless_fitting(group, sync)
    at = int(np.random.default_rng(seed).integers(0, 5))
    options: dict[str, Any] = {"signal_at": at} if end == "signal" else {"break_at": at}
    run = train(group, sync, ((0, 9), (9, 11)), random_delay(seed, 0.001), synchronous_sends=bool(seed % 2), **options)
    assert all_equal(group, run)
    done, good = run.arrivals, True
    if group.rank == 0:
        parts = group.size
        first, second = (sorted(task for _, task in segment) for segment in done)
        whole = -(-len(first) // parts)
        good = first == tasks((0, whole), parts)[: len(first)]
        if end == "signal":
            good = good and len(first) == whole * parts
        else:
            good = good and second in ([], tasks((9, 11), parts)[: len(second)])
        good = good and len(first) + len(second) < 11 * parts + 1 and len(second) > 0
    assert all(group.gather(good)), group.gather([len(segment) for segment in done])
    ends = [pulls[-1].over for pulls in run.pulls]
    assert all(group.gather(all(ends)))


@pytest.mark.simulated(min_size=2)
def test_a_signal_stops_before_all_is_done(group: Group) -> None:
    """In step it is known after which batch."""
    run = train(group, Sync("bsp", servers=2), ((0, 9),), signal_at=2)
    count = group.share(len(run.arrivals[0]))
    assert count == 3 * group.size


@pytest.mark.simulated(min_size=2, max_size=12)  # all have rows
def test_a_broken_gradient_is_not_used(group: Group) -> None:
    """It is the last rank's part of batch 1 that is missing in the second update, and there is no third."""
    run = train(group, Sync("bsp", servers=1), ((0, 9),), break_at=1)
    arrived, updates = group.share([len(run.arrivals[0]), run.updates])
    assert arrived == 2 * group.size and updates == [2]
    assert not any(group.gather(bool(np.allclose(run.weights[0], serial_weights(2)[0]))))
    assert all(group.gather(bool(np.isfinite(run.weights[0]).all())))


@pytest.mark.simulated(min_size=2)
def test_late_gradients_of_backup_workers_are_dropped(group: Group) -> None:
    """One worker is slow; each batch is done without it, and all have the same weights at the end."""

    def slow(rank: int, step: int) -> float:
        return 0.05 if rank == group.size - 1 else 0.0

    run = train(group, Sync("bsp", backup=1), ((0, 4), (4, 6)), slow, synchronous_sends=True)
    assert all_equal(group, run)
    updates, dropped, arrived = group.share([run.updates, run.dropped, [len(each) for each in run.arrivals]])
    assert updates == [4, 2]
    assert dropped[0] >= 1
    assert [a - d for a, d in zip(arrived, dropped, strict=True)] == [4 * (group.size - 1), 2 * (group.size - 1)]


@pytest.mark.simulated
@pytest.mark.parametrize("sync", IN_STEP, ids=name_of)
def test_messages_and_bytes_are_those_of_the_formula(group: Group, sync: Sync) -> None:
    """Per step and server 2 (N-1) of header and shard, 2N for a dedicated one, and one reply more to begin with."""
    skip_unless_fitting(group, sync)
    segments = ((0, 4), (4, 5))
    run = train(group, sync, segments, random_delay(3))
    shards = cut_shards(new_model().storage, sync.server_count)
    workers = len(sync.worker_ranks(group.size))
    distant = workers if sync.dedicated else workers - 1
    everyones = group.gather(run.traffic)
    for number, (first, stop) in enumerate(segments):
        steps, totals = stop - first, sync.server_count - 1
        messages = sync.server_count * distant * (2 * steps + 1) + totals
        sizes = [HEADER_BYTES + shard.nbytes(new_model().storage.data) for shard in shards]
        length = sum(sizes) * distant * (2 * steps + 1) + 16 * totals
        assert [sum(each[number][i] for each in everyones) for i in range(2)] == [messages, length]


@pytest.mark.simulated
@pytest.mark.parametrize("sync", [Sync("bsp", servers=1), Sync("bsp", servers=2, dedicated=True)], ids=name_of)
def test_on_a_device_it_goes_through_the_host(group: Group, sync: Sync) -> None:
    """The same bits, and an array of one kind that meets the other would raise."""
    skip_unless_fitting(group, sync)
    host, device = (train(group, sync, SEGMENTS, backend=backend) for backend in (numpy_backend(), device_backend()))
    assert all_equal(group, device)
    near = [np.allclose(a, b, rtol=1e-12, atol=1e-14) for a, b in zip(host.weights, device.weights, strict=True)]
    assert all(group.gather(all(near)))


class Hasty(ParameterServer):
    """A server that answers before its update: with the weights and the version from before it."""

    def release(self) -> list[Reply]:
        replies = [self._reply(grant) for grant in self.controller.release()]
        if self.controller.update_due:
            self._take()
        return replies


class Lenient(ParameterServer):
    """A server that lets workers go on although the slowest is one step further behind."""

    def release(self) -> list[Reply]:
        return [replace(reply, slowest=reply.slowest - 1) for reply in super().release()]


def step_once(group: Group, model: Module, talk: PushPull) -> str:
    """Open, pull, push and pull; return what the error says."""
    try:
        talk.open(1, 9, 0)
        pulled = talk.pull()
        assert pulled.task is not None
        rows, loss = gradient_of(model, pulled.task, group.size, numpy_backend())
        batch = pulled.task.batch
        talk.push(Push(pulled.task, rows, rows, rows_of(batch), rate_of(batch), 0, loss, 0.0, 0.0, 0.0, 0.0))
        talk.pull()
    except CommError as error:
        return str(error)
    return ""


@pytest.mark.simulated(check=False, max_size=12)  # all have rows
@pytest.mark.parametrize(
    ("server_class", "words"),
    [(Hasty, "has version 0 of the weights, but there must be version 1"), (Lenient, "1 steps ahead of the slowest")],
)
def test_a_server_that_answers_too_early_is_seen(group: Group, server_class: Any, words: str) -> None:
    """By every worker: the update without its gradient, and the lead that is too large."""
    model = new_model()
    talk, _ = make(group, Sync("bsp", servers=1), model, server_class=server_class)
    found = group.gather(step_once(group, model, talk))
    assert all(words in text for text in found), found
    talk.free()


@pytest.mark.simulated(check=False)
@pytest.mark.parametrize("servers", [1, 2])
def test_weights_of_another_segment_are_seen(group: Group, servers: int) -> None:
    """The last server counts segments differently; every worker sees it."""
    sync, model = Sync("bsp", servers=servers), new_model()
    skip_unless_fitting(group, sync)
    talk, _ = make(group, sync, model)
    endpoint = talk._endpoint
    if group.rank == servers - 1 and endpoint is not None:
        begin = endpoint.open
        endpoint.open = lambda segment, *rest: begin(segment + 1, *rest)  # type: ignore[method-assign]
    found = group.gather(step_once(group, model, talk))
    shard = servers - 1
    words = f"has segment 2, gradient 0, shard {shard}, but segment 1, gradient 0, shard {shard} must come now"
    assert all(words in text for text in found), found
    talk.free()


@pytest.mark.simulated(check=False)
def test_a_gradient_of_other_weights_is_seen(group: Group) -> None:
    """The server knows which version it gave to whom."""
    sync, model = Sync("bsp", servers=1), new_model()
    talk, _ = make(group, sync, model)
    talk.open(1, 9, 0)
    pulled = talk.pull()
    assert pulled.task is not None
    talk._versions = [5]
    found = ""
    if group.rank == 0:
        with pytest.raises(CommError) as caught:
            talk.push(Push(pulled.task, 1, 1, 13, 0.1, 0, 0.0, 0.0, 0.0, 0.0, 0.0))
        found = str(caught.value)
    assert "worker 0 pushed a gradient of version 5 of shard 0, but got version 0 last" in group.share(found)
    talk.free()


@pytest.mark.simulated
def test_calls_out_of_order_are_refused(group: Group) -> None:
    """Instead of waiting for ever."""
    sync, model = Sync("bsp", servers=1), new_model()
    talk, _ = make(group, sync, model)
    push = Push(tasks((0, 1), 1)[0], 1, 1, 13, 0.1, 0, 0.0, 0.0, 0.0, 0.0, 0.0)
    with pytest.raises(CommError, match="nothing to pull"):
        talk.pull()
    talk.open(0, 0, 0)
    with pytest.raises(CommError, match="not over for this worker"):
        talk.finish()
    with pytest.raises(CommError, match="call finish"):
        talk.open(0, 1, 0)
    with pytest.raises(CommError, match="nothing to push"):
        talk.push(push)
    assert talk.pull().over
    with pytest.raises(CommError, match="nothing to push"):
        talk.push(push)
    talk.finish()
    talk.free()
