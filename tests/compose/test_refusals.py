"""One table of refusals: each pair that it names is refused by the layout or the worker, in a
sentence with both.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from nnmpi import GradientExchange, Layout, Numerics, models, simulate
from nnmpi.base.errors import LayoutError
from nnmpi.comm.algorithms.ring import ring
from nnmpi.compose.refusals import REFUSED, matrix, refuse
from nnmpi.nn.chain import open_chain
from tests.harness.refusals import refuses, usage_error
from tests.worker_options import arranged

GIVEN = {
    "pp": {"pp": 2},
    "tp": {"tp": 2},
    "sp": {"sp": 2},
    "pipedream": {"pipeline": "pipedream"},
    "fixed": {"reduction": "fixed"},
    "zero": {"zero": 1},
    "limit": {"activation_memory": 2**20},
    "least": {"activation_memory": "least"},
    "state out": {"offload": "/tmp", "offload_state": "optimizer"},
}


def build():
    return models.mlp((4,), 3, hidden=(5, 5))


@pytest.mark.parametrize("one, other", REFUSED)
def test_each_pair_is_refused(one, other):
    refuses(
        LayoutError, f"{one} cannot be combined with {other}: ", refuse, {one: one, other: other}
    )
    if one in GIVEN and other in GIVEN:
        refuses(LayoutError, "cannot be combined with", lambda: Layout(**GIVEN[one] | GIVEN[other]))


@pytest.mark.parametrize("name", GIVEN)
def test_each_feature_goes_alone(name):
    Layout(**GIVEN[name])


@pytest.mark.parametrize(
    "layout, options, words",
    [
        (Layout(pp=2, pipeline="pipedream"), {"numerics": Numerics(precision="fp16")}, "pipedream"),
        (Layout(pp=2, pipeline="pipedream"), {"numerics": Numerics(clip=1.0)}, "pipedream"),
        (Layout(zero=1), {"exchange": GradientExchange(allreduce="star")}, "zero 1 cannot"),
        (Layout(zero=1), {"exchange": GradientExchange(allreduce=ring)}, "zero 1 cannot"),
        (Layout(reduction="fixed"), {"exchange": GradientExchange("ring")}, "fixed cannot"),
    ],
    ids=str,
)
def test_a_worker_refuses_what_does_not_go_with_its_layout(layout, options, words):
    split = "auto" if layout.pp == "auto" else (3, len(open_chain(build())) - 3)

    def main(group):
        arranged(build(), group, replace(layout, split=split), **options)

    usage_error(words, simulate, main, 2)


def test_the_page_shows_the_table():
    page = (Path(__file__).resolve().parents[2] / "docs/reference/layouts.md").read_text()
    assert "\n".join(matrix()) in page
