"""Finding a circle in a graph."""

from collections.abc import Mapping, Set
from graphlib import CycleError, TopologicalSorter


def find_cycle(edges: Mapping[str, Set[str]]) -> list[str]:
    """Return the nodes of a circle, the first again at the end, or nothing when there is none."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        return circle[::-1]
    return []
