"""The mode of synchrony of a run, with its settings.

To add a mode, write its row in `MODES`: option, help, checks, header and tests follow from it. What
it does is a coupling's business: for one that averages weights a class and its row of AVERAGES in
the wing; for one with a server a bound, and if that counts something else than steps, its row in
RULES of the wing's `consistency`. A user's own class averages weights, too, and needs no row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

from nnmpi.base.command import PLAIN, check_idle, check_numbers, settings
from nnmpi.base.custom import Custom, name_of
from nnmpi.base.errors import UsageError, counted
from nnmpi.base.glossary import Glossary


class Bound(NamedTuple):
    """How far a server lets workers drift apart; "4 steps" as text.

    Attributes:
        most: the largest number of these units.
        unit: what is counted, a row of `asynchronous.consistency.RULES`.
    """

    most: int
    unit: str = "step"

    def __str__(self) -> str:
        return counted(self.most, self.unit)


STALENESS, LOCAL_STEPS = 4, 8


@dataclass(frozen=True)
class SyncMode:
    """A mode of synchrony; all that lists or compares modes reads these.

    Attributes:
        text: for the head of a run; in braces `mode`, its name, and what `sync` has, its settings.
        help: when its ranks wait, for the help of options.
        combines: how ranks come together: by an all-reduce in each step, through a server on rank
            0, or by averages of weights.
        settings: the fields of `Sync` that have a meaning with it.
        bound: the settings -> how far a server lets workers drift apart; None for any distance.
        fewest: the ranks that it needs at least.
    """

    text: str
    help: str
    combines: Literal["all-reduce", "server", "averages"] = "averages"
    settings: tuple[str, ...] = ()
    bound: Callable[["Sync"], Bound | None] = lambda sync: None
    fewest: int = 1


_OUTER = ("local_steps", "outer_lr", "outer_momentum")
_AVERAGING = SyncMode(
    "{mode}, the weights averaged every {sync.every}{sync.outer}", "", settings=_OUTER
)

MODES: Mapping[Any, SyncMode] = {
    "bsp": SyncMode(
        "bsp, the gradients summed by all-reduce",
        "in every step, for an all-reduce (bulk-synchronous parallel)",
        "all-reduce",
    ),
    "asp": SyncMode(
        "asp; rank 0 is the server, and computes too", "never (asynchronous parallel)", "server"
    ),
    "ssp": SyncMode(
        "ssp, at most {sync.bound} ahead; rank 0 is the server, and computes too",
        "when more than `staleness` steps ahead of the slowest (stale-synchronous parallel)",
        "server",
        ("staleness",),
        lambda sync: Bound(STALENESS if sync.staleness is None else sync.staleness),
    ),
    "local": SyncMode(
        "local, the weights averaged every {sync.every}{sync.diloco}",
        "every `local_steps` steps, to average weights",
        settings=_OUTER,
    ),
    "slowmo": SyncMode(
        _AVERAGING.text, "the same as local, with momentum of the averages", settings=_OUTER
    ),
    "gossip": SyncMode(
        "gossip, the weights averaged with the neighbours on a ring",
        "each rank for its neighbours on a ring, to average weights with them after each step",
        fewest=2,
    ),
}
"""The modes by name."""

_ROWS = {**MODES, PLAIN[Custom][0]: _AVERAGING}
# {setting: the modes with which it has a meaning}
NEEDS = {
    setting: [mode for mode, row in _ROWS.items() if setting in row.settings]
    for row in MODES.values()
    for setting in row.settings
}


@settings
@dataclass(frozen=True)
class Sync:
    """The synchrony of a run: how far workers may drift apart, and how they combine.

    Raises:
        UsageError: for values out of range, and settings that the mode would not use.

    Example:
        >>> nnmpi.Sync("ssp", staleness=2).asynchronous
        True
        >>> nnmpi.Sync("local", local_steps=4, outer_lr=0.7, outer_momentum=0.5).sync  # DiLoCo
        'local'
    """

    _former = MappingProxyType({"mode": "sync"})
    _needs = MappingProxyType(NEEDS)

    sync: (
        Annotated[str, tuple(MODES), Glossary({name: row.help for name, row in MODES.items()})]
        | Callable[..., Any]
    ) = "bsp"
    """When ranks wait for one another, or an Averaging of your own."""
    staleness: int | None = None
    """Steps of lead: how far a worker may be ahead of the slowest (default: 4). Reports count the
    staleness of gradients in updates instead. 0 is bsp through a server, except that `clip` clips
    each worker's gradient instead of their sum.
    """
    local_steps: int | None = None
    """Local steps between two averages (default: 8)."""
    outer_lr: float = 1.0
    """The outer learning rate, for a step along the mean displacement. With local 0.7, and
    `outer_momentum` 0.5, allows more `local_steps` (DiLoCo).
    """
    outer_momentum: float = 0.0
    """Momentum of that step, with local Nesterov's. 0.9 amplifies steps up to 10 times."""

    def __post_init__(self) -> None:
        """Check that the settings make sense by themselves."""
        check_idle(self, "sync", NEEDS)
        check_numbers(self, "staleness", 0)
        check_numbers(self, "local_steps", 1)
        check_numbers(self, "outer_lr", 0, above=True)
        check_numbers(self, "outer_momentum", 0, 1)

    @property
    def mode(self) -> SyncMode:
        """The row of the mode; of a user's class that of averages."""
        return MODES.get(self.sync, _AVERAGING)

    @property
    def has_server(self) -> bool:
        """Whether gradients and weights go through a parameter server."""
        return self.mode.combines == "server"

    @property
    def asynchronous(self) -> bool:
        """Whether it is anything but an all-reduce in each step."""
        return self.mode.combines != "all-reduce"

    @property
    def bound(self) -> Bound | None:
        """How far a server lets workers drift apart; None for any distance."""
        return self.mode.bound(self)

    @property
    def period(self) -> int:
        """The local steps between two averages."""
        return self.local_steps or LOCAL_STEPS

    def check(self, ranks: int) -> None:
        """Refuse a mode that needs more ranks."""
        if ranks < self.mode.fewest:
            raise UsageError(
                f"{name_of(self.sync)} on {counted(ranks, 'rank')} has no neighbours to average"
                f" with; start at least {self.mode.fewest} ranks"
            )

    def describe(self) -> str:
        """Return it as text, for the head of a run."""
        return self.mode.text.format(mode=name_of(self.sync), sync=self)

    @property
    def every(self) -> str:
        """The period as text."""
        return counted(self.period, "step")

    @property
    def outer(self) -> str:
        """The outer optimizer as text."""
        return self._describe_outer("", "")

    @property
    def diloco(self) -> str:
        """The outer optimizer as text, if its momentum is Nesterov's."""
        return self._describe_outer("Nesterov's ", " (DiLoCo)")

    def _describe_outer(self, kind: str, name: str) -> str:
        if (self.outer_lr, self.outer_momentum) == (1, 0):
            return ""
        return (
            f"; outer learning rate {self.outer_lr:g}, {kind}momentum {self.outer_momentum:g}{name}"
        )


def without_server() -> str:
    """Return the names of the modes without a server, for sentences."""
    return ", ".join(name for name, row in MODES.items() if row.combines != "server")
