"""The mesh: every rank at one place, groups, what is derived and refused, nodes, pictures; and
bound to MPI's ranks.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnmpi.base.errors import LayoutError
from nnmpi.comm.mesh import AXES, Coordinates, Mesh, fitting
from tests.harness.refusals import told

axis = st.integers(1, 5)


def on_one_node(mesh, *axes):
    """Return how many groups of some axes lie on one node."""
    nodes = mesh.nodes or (0,) * mesh.size
    return sum(len({nodes[rank] for rank in group}) == 1 for group in mesh.groups(*axes))


def check(mesh):
    """Every rank has one place."""
    places = [mesh.coordinates(rank) for rank in range(mesh.size)]
    assert len(set(places)) == mesh.size
    assert places[0] == (0, 0, 0, 0)
    for axes in ("d", "p", "t", "s", "ds", "pt"):
        for group in mesh.groups(*(f"{axis}p" for axis in axes)):
            assert group == sorted(group, key=lambda rank: [getattr(places[rank], a) for a in axes])
            assert len({places[rank]._replace(**dict.fromkeys(axes, 0)) for rank in group}) == 1


@given(axis, axis, axis, st.integers(1, 3))
def test_every_rank_has_one_place(dp, pp, tp, sp):
    mesh = Mesh(dp, pp, tp, sp=sp)
    check(mesh)
    places = map(mesh.coordinates, range(mesh.size))
    assert all(rank == ((d * pp + p) * sp + s) * tp + t for rank, (d, p, t, s) in enumerate(places))
    assert mesh == Mesh.of(dp * pp * tp * sp, dp, pp, tp, sp=sp)


@given(axis, axis, st.data())
def test_ranks_on_any_nodes(pp, tp, data):
    """Those of one node stand together, in their order; the first rank's node comes first."""
    dp, sp = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 2))
    size = dp * pp * tp * sp
    nodes = tuple(
        data.draw(st.lists(st.sampled_from([7, 3, -1, 12]), min_size=size, max_size=size))
    )
    mesh = Mesh(dp, pp, tp, nodes, sp)
    check(mesh)
    (placed,) = mesh.groups("dp", "pp", "sp", "tp")
    assert placed == [
        rank for node in dict.fromkeys(nodes) for rank in range(size) if nodes[rank] == node
    ]


def test_thousands_of_ranks():
    """On nodes of 64 ranks, dealt in turn; and a prime number of them."""
    nodes = tuple(rank % 128 for rank in range(8192))
    mesh = Mesh(64, 16, 8, nodes)
    check(mesh)
    assert on_one_node(mesh, "tp") == 1024
    assert on_one_node(mesh, "pp", "tp") == 0
    assert all(len({nodes[rank] for rank in replica}) == 2 for replica in mesh.groups("pp", "tp"))
    assert Mesh.of(7919).shape == (7919, 1, 1, 1)


@pytest.mark.parametrize(
    "asked, shape",
    [
        ({}, (24, 1, 1)),
        ({"pp": 2}, (12, 2, 1)),
        ({"tp": 3}, (8, 1, 3)),
        ({"pp": 2, "tp": 3}, (4, 2, 3)),
        ({"dp": 2, "tp": 3}, (2, 4, 3)),
        ({"dp": 3, "pp": 8}, (3, 8, 1)),
        ({"dp": 24}, (24, 1, 1)),
        ({"dp": 1, "pp": 1, "tp": 24}, (1, 1, 24)),
    ],
    ids=str,
)
def test_what_is_left_out_is_derived(asked, shape):
    assert Mesh.of(24, **asked).shape == (*shape, 1)
    assert Mesh.of(48, **asked, sp=2).shape == (*shape, 2)
    assert Mesh.of(24, **asked, nodes=[0] * 24).nodes == (0,) * 24


@pytest.mark.parametrize(
    "world, asked, words",
    [
        (8, (3, 2, 1), "8 ranks are not dp 3 x pp 2 x tp 1 = 6; these fit: dp 4 x pp 2 x tp 1, "),
        (6, (None, 2, 2), "6 ranks are not a multiple of pp 2 x tp 2 = 4"),
        (4, (2, None, None), "4 ranks are not dp 2 x pp 1 x tp 1 = 2"),
        (
            1,
            (1, 2, None),
            "1 rank is not a multiple of dp 1 x pp 2 = 2; these fit: dp 1 x pp 1 x tp 1",
        ),
        (6, (1, None, 1, None, 4), "6 ranks are not a multiple of dp 1 x tp 1 x sp 4 = 4"),
        (8, (None, 0, None), "pp 0 is impossible; give at least 1"),
        (0, (None, None, None), "a world of 0 ranks is impossible; give at least 1"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(world, asked, words):
    with pytest.raises(LayoutError) as caught:
        Mesh.of(world, *asked)
    assert words in str(caught.value)


@given(st.integers(1, 60))
def test_what_fits_is_complete(world):
    shapes = [mesh.shape for mesh in fitting(world, {"dp": 2, "pp": None, "tp": 3})]
    every = range(1, world + 1)
    assert sorted(shapes) == [
        (d, p, t, 1) for d in every for p in every for t in every if d * p * t == world
    ]
    if world % 6 == 0:
        assert shapes[0] == (2, world // 6, 3, 1)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Mesh(2, -1, 1), "pp -1 is impossible"),
        (lambda: Mesh(2, 1, 1, (0,)), "nodes are given for 1 ranks, but dp 2 x pp 1 x tp 1 has 2"),
        (lambda: Mesh(2).coordinates(2), "rank 2 is not one of dp 2 x pp 1 x tp 1 = 2 ranks"),
        (lambda: Mesh(2).coordinates(-1), "rank -1"),
    ],
)
def test_what_does_not_exist(make, words):
    with pytest.raises(LayoutError, match=words):
        make()


# ---- on MPI ----


def nodes_for(size):
    return [None, [rank % 2 for rank in range(size)], [size - rank for rank in range(size)]]


@pytest.mark.mpi
def test_the_groups_of_a_rank_are_those_of_the_arithmetic(group):
    """For every layout of these ranks: who is in a group, and in which order."""
    for dp, pp, tp, sp in (
        mesh.shape for asked in (1, 2) for mesh in fitting(group.size, {"sp": asked})
    ):
        for nodes in nodes_for(group.size):
            mesh = Mesh.of(group.size, dp, pp, tp, nodes, sp)
            bound = mesh.bind(group)
            place = mesh.coordinates(group.rank)
            wrong = (
                []
                if bound.coordinates == place and isinstance(bound.coordinates, Coordinates)
                else ["coordinates"]
            )
            groups = (bound.dp, bound.pp, bound.tp, bound.sp)
            if bound.replicas.rank != place.d * sp + place.s:
                wrong.append("replicas")
            for axis, mine in zip((*AXES, "pp tp"), (*groups, bound.model), strict=True):
                expected = next(
                    ranks for ranks in mesh.groups(*axis.split()) if group.rank in ranks
                )
                if mine.gather(group.rank) != expected or expected[mine.rank] != group.rank:
                    wrong.append(axis)
            if (*(local.rank for local in groups), bound.world) != (*place, group):
                wrong.append("ranks")
            bound.free()
            assert group.gather(wrong) == [[]] * group.size


@pytest.mark.mpi
def test_the_nodes_that_mpi_knows_can_be_asked_for(group):
    mesh = Mesh.of(group.size, nodes=group.nodes())
    assert group.gather(on_one_node(mesh, "tp")) == [group.size] * group.size


@pytest.mark.mpi
def test_another_number_of_ranks_is_refused_on_all(group):
    text = told(LayoutError, lambda: Mesh(group.size + 1).bind(group))
    assert all(f"not dp {group.size + 1} x pp 1 x tp 1" in item for item in group.gather(text))
