"""What a fit says of itself: the segments of a link, and the lines that people read."""

import pytest

from nnmpi.comm.fitting.report import describe_fit, find_eager_limit, predictions, segments
from nnmpi.comm.machine import Curve
from tests.comm.test_fit import make

STEP = tuple(
    [(float(n), 1e-6 + n * 1e-10) for n in (8, 256, 1024, 2048, 4096)]
    + [(float(n), 3e-6 + n * 1e-10) for n in (6144, 8192, 16384, 65536, 2**22)]
    + [(float(2**24), 3e-6 + 2**22 * 1e-10 + (2**24 - 2**22) * 2e-10)]
)


def test_the_step_between_eager_and_rendezvous_is_found() -> None:
    assert find_eager_limit(Curve(STEP)) == 4096
    assert find_eager_limit(Curve(STEP[:5])) is None
    assert find_eager_limit(Curve.line(1e-6, 1e-10)) is None


def test_a_curve_has_three_segments_with_their_alpha_and_beta() -> None:
    eager, rendezvous, out = segments(Curve(STEP), cache_bytes=2**22)
    assert (eager.name, rendezvous.name, out.name) == ("eager", "rendezvous", "out of cache")
    assert (eager.stop_bytes, rendezvous.start_bytes, out.stop_bytes) == (4096, 6144, 2**24)
    assert [part.beta_s for part in (eager, rendezvous, out)] == pytest.approx([1e-10, 1e-10, 2e-10])
    assert eager.step_s == pytest.approx(0, abs=1e-12)
    assert rendezvous.step_s == pytest.approx(2e-6)


def test_the_lines_have_both_links_and_every_algorithm() -> None:
    text = "\n".join(describe_fit(make()))
    assert text.startswith("4 ranks on 2 nodes, Open MPI 5.0.11")
    assert "messages inside a node, one way: alpha 1 us" in text
    assert "messages between nodes, both ways at once: alpha 10 us" in text
    assert "beta 1.000 ns/B (1.0 GB/s)" in text
    table = list(predictions(make(), (1000, 2**20)))
    assert table[0].split() == ["predicted", "1000", "B", "1", "MB"]
    assert table[1].split() == ["native", "5", "us", "2.1", "ms"]
    assert {line.split()[0] for line in table[2:]} >= {"shared", "ring", "tree", "ps", "hierarchical"}
