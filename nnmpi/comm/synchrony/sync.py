"""The mode of synchrony of a run, with its settings."""

from dataclasses import dataclass

from nnmpi.base.errors import UsageError, check_int, counted

MODES = ("bsp", "asp", "ssp", "local", "gossip")

DEFAULT_STALENESS = 4
DEFAULT_LOCAL_STEPS = 8


@dataclass(frozen=True)
class Sync:
    """The synchrony of a run: how far workers may drift apart, and how they combine.

        bsp       every worker waits for all, by all-reduce (bulk-synchronous parallel)
        ssp       a worker is at most `staleness` steps ahead of the slowest (stale-synchronous
                  parallel)
        asp       no worker waits (asynchronous parallel)
        local     every worker trains alone, and all average their weights every `local_steps` steps
        gossip    every worker averages its weights with its neighbours' on a ring after each step

    Args:
        mode: one of these.
        staleness: for ssp; 0 is bsp through the parameter server.
        local_steps: for local.
        outer_lr, outer_momentum: for local; values other than 1 and 0 make it DiLoCo, see
            `parallel.averaging`.

    Raises:
        UsageError: for values out of range, and settings that the mode would not use.

    Example:
        >>> nnmpi.Sync("ssp", staleness=2).asynchronous
        True
        >>> nnmpi.Sync("local", local_steps=4, outer_lr=0.7, outer_momentum=0.5).mode  # DiLoCo
        'local'
    """

    mode: str = "bsp"
    staleness: int = DEFAULT_STALENESS
    local_steps: int = DEFAULT_LOCAL_STEPS
    outer_lr: float = 1.0
    outer_momentum: float = 0.0

    def __post_init__(self) -> None:
        """Check that the settings make sense by themselves."""
        if self.mode not in MODES:
            raise UsageError(f"mode {self.mode!r} is unknown; choose one of {', '.join(MODES)}")
        check_int("staleness", self.staleness, 0)
        check_int("local_steps", self.local_steps)
        for name, default, mode in (
            ("staleness", DEFAULT_STALENESS, "ssp"),
            ("local_steps", DEFAULT_LOCAL_STEPS, "local"),
            ("outer_lr", 1.0, "local"),
            ("outer_momentum", 0.0, "local"),
        ):
            value = getattr(self, name)
            if value != default and self.mode != mode:
                raise UsageError(f"{name} {value} is for {mode}, not {self.mode}; leave it out")

    @property
    def has_server(self) -> bool:
        """Whether gradients and weights go through a parameter server."""
        return self.mode in ("asp", "ssp")

    @property
    def asynchronous(self) -> bool:
        """Whether it is anything but an all-reduce in each step."""
        return self.mode != "bsp"

    @property
    def bound(self) -> int | None:
        """The largest lead over the slowest worker, in steps; None for any."""
        return self.staleness if self.mode == "ssp" else None

    def check(self, ranks: int) -> None:
        """Refuse gossip on a single rank."""
        if self.mode == "gossip" and ranks == 1:
            raise UsageError(
                "gossip on one rank has no neighbours to average with; start at least 2 ranks"
            )

    def describe(self) -> str:
        """Return it as text, for the head of a run."""
        return {
            "bsp": "bsp, the gradients summed by all-reduce",
            "ssp": (
                f"ssp, at most {counted(self.staleness, 'step')} ahead; rank 0 is the server, and"
                " computes too"
            ),
            "asp": "asp; rank 0 is the server, and computes too",
            "local": (
                "local, the weights averaged every"
                f" {counted(self.local_steps, 'step')}{self._outer}"
            ),
            "gossip": "gossip, the weights averaged with the neighbours on a ring",
        }[self.mode]

    @property
    def _outer(self) -> str:
        if (self.outer_lr, self.outer_momentum) == (1, 0):
            return ""
        return (
            f"; outer learning rate {self.outer_lr:g}, Nesterov's momentum {self.outer_momentum:g}"
            " (DiLoCo)"
        )
