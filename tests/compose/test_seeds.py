"""Training out of step under many seeds: whatever the order, bounds hold, nothing is lost, and a
seed is repeatable.
"""

import hashlib

import pytest

from nnmpi import Sync, simulate
from nnmpi.comm.synchrony.sync import MODES
from tests.asynchronous.runs import EVERY_MODE, SEGMENTS, everything, make, name_of, train
from tests.compose.small_runs import ROWS
from tests.harness.slow import MORE_SEEDS, once_more

SEEDS = [range(4), once_more(range(4, 16), reason=MORE_SEEDS)]
SERVED = (
    *(Sync(name) for name, row in MODES.items() if row.combines == "server"),
    Sync("ssp", staleness=1),
)


def run(sync, ranks, seed, cpu_factor=1.0, **options):
    """Train in a simulated world; return the reports, and a hash of all that was learnt."""

    def main(group):
        worker = make(group, sync, "momentum", **options)
        reports = train(worker)
        learnt = hashlib.sha256(everything(worker).tobytes()).hexdigest()
        worker.release()
        return reports, learnt

    result = simulate(main, ranks, seed=seed, cpu_factor=cpu_factor)
    assert len({learnt for _, learnt in result}) == 1  # all ranks meet with the same
    return result[0]


@pytest.mark.parametrize("seeds", SEEDS, ids=["4", "12 more"])
@pytest.mark.parametrize("sync", SERVED, ids=name_of)
def test_bounds_hold_and_nothing_is_lost(sync, seeds):
    """Every sample of an epoch is used once."""
    for seed in seeds:
        reports, _ = run(sync, ranks=4 + seed % 3, seed=seed)
        for (_, begin, end), report in zip(SEGMENTS, reports, strict=True):
            assert report.batches == end - begin
            if sync.bound is not None and sync.bound.unit == "step":
                assert report.lead <= sync.bound.most
        for epoch in (reports[:2], reports[2:]):
            samples = sum(report.totals.samples for report in epoch)
            assert samples == ROWS


@pytest.mark.parametrize("cpu_factor", [0.0, 1.0])
@pytest.mark.parametrize("sync", EVERY_MODE, ids=name_of)
def test_a_seed_is_repeatable(sync, cpu_factor):
    """To the last bit of weights and state, by time and by draws."""
    pace = {"slow": "ms=10;rank=3,factor=3"} if cpu_factor == 0 else {}
    first, again = (run(sync, 5, 7, cpu_factor, **pace) for _ in range(2))
    assert first[1] == again[1]
    if cpu_factor == 0:
        # A device is looked at until it has finished, and every look takes a simulated rank 0.1 us.
        for item, other in zip(first[0], again[0], strict=True):
            assert vars(item.totals) == pytest.approx(vars(other.totals), abs=1e-5)
