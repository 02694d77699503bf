"""The mode of synchrony of a run, with its settings.

To add a mode, write its row in `MODES`: option, help, checks and header follow from it. What it
does is a coupling's business, or for one that averages weights a row of AVERAGES in the wing. A
user's own class averages weights, too, and needs no row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any

from nnmpi.base.command import PLAIN, check_idle, check_numbers, settings
from nnmpi.base.custom import Custom, name_of
from nnmpi.base.errors import UsageError, counted

_AVERAGES = (
    "{mode}, the weights averaged every {every}{outer}",
    *("local_steps", "outer_lr", "outer_momentum"),
)
# {mode: its text for the head of a run, which `Sync.describe` fills in; then its own settings}
MODES: dict[Any, tuple[str, ...]] = {
    "bsp": ("bsp, the gradients summed by all-reduce",),
    "asp": ("asp; rank 0 is the server, and computes too",),
    "ssp": ("ssp, at most {lead} ahead; rank 0 is the server, and computes too", "staleness"),
    "local": _AVERAGES,
    "slowmo": _AVERAGES,
    "gossip": ("gossip, the weights averaged with the neighbours on a ring",),
}
_ROWS = {**MODES, PLAIN[Custom][0]: _AVERAGES}
# {setting: the modes with which it has a meaning}
NEEDS = {
    setting: [mode for mode, row in _ROWS.items() if setting in row[1:]]
    for row in MODES.values()
    for setting in row[1:]
}
STALENESS, LOCAL_STEPS = 4, 8


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

    sync: Annotated[str, tuple(MODES)] | Callable[..., Any] = "bsp"
    """When ranks wait for one another. bsp: in every step, for an all-reduce (bulk-synchronous
    parallel). asp: never (asynchronous parallel). ssp: when more than `staleness` steps ahead of
    the slowest (stale-synchronous parallel). local: every `local_steps` steps, to average weights.
    slowmo: the same, with momentum of the averages. gossip: each rank for its neighbours on a ring,
    to average weights with them after each step. Or an Averaging of your own.
    """
    staleness: int | None = None
    """With ssp: steps a worker may be ahead of the slowest (default: 4). 0 is bsp through a server,
    except that `clip` clips each worker's gradient instead of their sum.
    """
    local_steps: int | None = None
    """With local and slowmo: local steps between two averages (default: 8)."""
    outer_lr: float = 1.0
    """With local and slowmo: the outer learning rate, for a step along the mean displacement. With
    local 0.7, and `outer_momentum` 0.5, allows more `local_steps` (DiLoCo).
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
    def has_server(self) -> bool:
        """Whether gradients and weights go through a parameter server."""
        return self.sync in ("asp", "ssp")

    @property
    def asynchronous(self) -> bool:
        """Whether it is anything but an all-reduce in each step."""
        return self.sync != "bsp"

    @property
    def bound(self) -> int | None:
        """The largest lead over the slowest worker, in steps; None for any."""
        if self.sync not in NEEDS["staleness"]:
            return None
        return STALENESS if self.staleness is None else self.staleness

    @property
    def period(self) -> int:
        """The local steps between two averages."""
        return self.local_steps or LOCAL_STEPS

    def check(self, ranks: int) -> None:
        """Refuse gossip on a single rank."""
        if self.sync == "gossip" and ranks == 1:
            raise UsageError(
                "gossip on one rank has no neighbours to average with; start at least 2 ranks"
            )

    def describe(self) -> str:
        """Return it as text, for the head of a run."""
        return MODES.get(self.sync, _AVERAGES)[0].format(
            mode=name_of(self.sync),
            lead=counted(self.bound or 0, "step"),
            every=counted(self.period, "step"),
            outer=self._outer,
        )

    @property
    def _outer(self) -> str:
        if (self.outer_lr, self.outer_momentum) == (1, 0):
            return ""
        nesterov, name = ("Nesterov's ", " (DiLoCo)") if self.sync == "local" else ("", "")
        return (
            f"; outer learning rate {self.outer_lr:g}, {nesterov}momentum"
            f" {self.outer_momentum:g}{name}"
        )
