"""Any machine, for property tests."""

from hypothesis import strategies as st

from nnmpi.comm.machine import Curve, Link, Machine

_SECONDS = st.floats(0.01, 1.0)


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    """Return a curve that rises, with a step in it."""
    alpha_s, jump_s, first_s, second_s = (draw(_SECONDS) for _ in range(4))
    edge = draw(st.integers(8, 200))
    eager = alpha_s + first_s * edge
    return Curve(
        ((0, alpha_s), (edge, eager), (edge + 1, eager + jump_s), (2 * edge, eager + jump_s + edge * second_s))
    )


@st.composite
def links(draw: st.DrawFn) -> Link:
    """Return a link whose two curves have nothing to do with one another."""
    return Link(draw(curves()), draw(curves()))


@st.composite
def machines(draw: st.DrawFn, size: int, shared_links: bool) -> Machine:
    """Return a machine for so many ranks: all on one node, each on its own, or (if links may be shared) anyhow."""
    nodes = draw(st.sampled_from([None, tuple(range(size))]))
    if shared_links:
        nodes = tuple(draw(st.lists(st.integers(0, 3), min_size=size, max_size=size)))
    ranks = st.integers(0, size - 1)
    return Machine(
        draw(links()),
        draw(links()),
        nodes,
        draw(curves()),
        slow_ranks=draw(st.dictionaries(ranks, st.floats(0.5, 5.0))),
        slow_nodes=draw(st.dictionaries(st.sampled_from(sorted(set(nodes or (0,)))), st.floats(0.5, 5.0))),
        late=draw(st.dictionaries(ranks, st.floats(0.0, 50.0))),
    )
