"""What is to be measured: on which hosts, at which rates, which sizes and algorithms, how often."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from benchmarks.netlab.build import MAX_HOSTS
from benchmarks.netlab.link import Speed
from nnmpi.comm.algorithms.registry import ALGORITHMS, NATIVE
from nnmpi.comm.sizes import parse_bytes
from nnmpi.errors import UsageError

T = TypeVar("T")


@dataclass(frozen=True)
class Plan:
    """What `bench` measures: every algorithm at every size on every number of hosts at every rate.

    Attributes:
        cut_bytes: messages longer than that are cut into pieces.
    """

    hosts: tuple[int, ...]
    speeds: tuple[Speed, ...]
    sizes: tuple[int, ...]
    algorithms: tuple[str, ...]
    repeats: int
    cut_bytes: int

    @classmethod
    def parse(cls, hosts: str, rates: str, sizes: str, algorithms: str, repeats: int, cut: str) -> Plan:
        """Read lists with commas between their words.

        Raises:
            UsageError: for a word that is not what it should be.
        """
        if repeats < 1:
            raise UsageError(f"a time is measured at least once, not {repeats} times")
        return cls(
            _each(hosts, _parse_hosts),
            _each(rates, Speed),
            _each(sizes, _parse_size),
            _each(algorithms, _check_algorithm),
            repeats,
            parse_bytes(cut),
        )

    def limit_s(self, hosts: int, speed: Speed) -> float:
        """Return the time after which a job on so many hosts hangs: thrice what servers would take for all of it."""
        server_s = sum(2 * (hosts - 1) * nbytes for nbytes in self.sizes) / speed.payload_bytes_per_s
        return 60.0 + 3 * (self.repeats + 2) * (len(self.algorithms) + 1) * server_s


def as_json(plan: Plan) -> dict[str, Any]:
    """Return what one job needs to know of the plan."""
    return {
        "sizes": plan.sizes,
        "algorithms": plan.algorithms,
        "repeats": plan.repeats,
        "cut_bytes": plan.cut_bytes,
    }


def _each(text: str, parse: Callable[[str], T]) -> tuple[T, ...]:
    """Return the words between commas, each read by `parse`, without doubles."""
    return tuple(dict.fromkeys(parse(word.strip()) for word in text.split(",")))


def _parse_hosts(word: str) -> int:
    if not word.isdecimal() or not 2 <= int(word) <= MAX_HOSTS:
        raise UsageError(f"{word!r} is not a number of hosts from 2 to {MAX_HOSTS}; write --hosts 2,4,8")
    return int(word)


def _parse_size(word: str) -> int:
    nbytes = parse_bytes(word)
    if nbytes < 4 or nbytes % 4:
        raise UsageError(f"a buffer of float32 has a multiple of 4 bytes, not {nbytes}")
    return nbytes


def _check_algorithm(word: str) -> str:
    names = (*ALGORITHMS, NATIVE)
    if word not in names:
        raise UsageError(f"there is no algorithm {word!r} to run on the lab; the names are {', '.join(names)}")
    return word
