"""Which kind of synchrony a run has, with its settings."""

from dataclasses import dataclass

from nnmpi.errors import UsageError, counted, whole
from nnmpi.synchrony.neighbours import NEIGHBOURS, RING

MODES = ("bsp", "asp", "ssp", "local", "gossip")

DEFAULT_STALENESS = 4
DEFAULT_LOCAL_STEPS = 8


@dataclass(frozen=True)
class Sync:
    """How far the workers of a run may drift apart, and how their work comes together.

        bsp       everybody waits for everybody, by all-reduce or at servers (bulk-synchronous parallel)
        ssp       a worker is at most `staleness` steps ahead of the slowest (stale-synchronous parallel)
        asp       nobody waits (asynchronous parallel)
        local     every worker trains alone, and all average their weights every `local_steps` steps
        gossip    every worker averages its weights with its neighbours' after each step

    Args:
        mode: one of these.
        staleness: for ssp; 0 is bsp.
        local_steps: for local.
        servers: how many ranks hold the weights: the first ones; 0 stands for 1 where servers are needed, and for an
            all-reduce with bsp.
        dedicated: whether servers do nothing else, or compute as well.
        backup: for bsp: how many of a batch's gradients are not waited for.
        neighbours: for gossip: "ring", or "random" pairs.
        adapt: for asp and ssp: whether stale gradients count less (see `parallel.server`).

    Raises:
        UsageError: for values out of range, and settings that the mode would not use.
    """

    mode: str = "bsp"
    staleness: int = DEFAULT_STALENESS
    local_steps: int = DEFAULT_LOCAL_STEPS
    servers: int = 0
    dedicated: bool = False
    backup: int = 0
    neighbours: str = RING
    adapt: bool = False

    def __post_init__(self) -> None:
        """Check that the settings make sense by themselves."""
        _choose("mode", self.mode, MODES)
        _choose("neighbours", self.neighbours, NEIGHBOURS)
        whole("staleness", self.staleness, 0)
        whole("local_steps", self.local_steps, 1)
        whole("servers", self.servers, 0)
        whole("backup", self.backup, 0)
        self._check_used(f"staleness {self.staleness}", self.staleness != DEFAULT_STALENESS, "ssp")
        self._check_used(f"local_steps {self.local_steps}", self.local_steps != DEFAULT_LOCAL_STEPS, "local")
        self._check_used(f"neighbours {self.neighbours}", self.neighbours != RING, "gossip")
        self._check_used(f"backup {self.backup}", self.backup > 0, "bsp")
        self._check_used("adapt", self.adapt, "asp", "ssp")
        self._check_used(f"servers {self.servers}", self.servers > 0, "bsp", "asp", "ssp")
        self._check_used("dedicated", self.dedicated, "bsp", "asp", "ssp")
        if self.backup and self.servers > 1:
            raise UsageError(
                f"backup {self.backup} with servers {self.servers}: which gradients come too late is decided at "
                "one place; give servers 1"
            )
        if self.dedicated and not self.uses_servers:
            raise UsageError("dedicated servers with bsp: there are none; give servers 1 or more, too")

    @property
    def uses_servers(self) -> bool:
        """Whether gradients and weights go through servers."""
        return self.mode in ("asp", "ssp") or (self.mode == "bsp" and (self.servers > 0 or self.backup > 0))

    @property
    def asynchronous(self) -> bool:
        """Whether it is anything but an all-reduce in each step."""
        return self.mode != "bsp" or self.uses_servers

    @property
    def bound(self) -> int | None:
        """How many steps a worker may be ahead of the slowest; None for any number."""
        return {"bsp": 0, "ssp": self.staleness}.get(self.mode)

    @property
    def server_count(self) -> int:
        """How many servers there are."""
        return max(1, self.servers) if self.uses_servers else 0

    def server_ranks(self, ranks: int) -> range:
        """Return which of the ranks are servers."""
        return range(min(self.server_count, ranks))

    def worker_ranks(self, ranks: int) -> range:
        """Return which of the ranks compute."""
        return range(self.server_count if self.dedicated else 0, ranks)

    def check(self, ranks: int) -> None:
        """Check that the settings make sense on so many ranks.

        Raises:
            UsageError: for more servers than ranks, no rank that computes, as many backup workers as workers, or
                gossip with nobody.
        """
        if self.server_count > ranks:
            raise UsageError(
                f"servers {self.servers} on {counted(ranks, 'rank')}: every server is a rank of its own; give at most "
                f"{ranks}, or start more ranks"
            )
        workers = len(self.worker_ranks(ranks))
        if workers == 0:
            raise UsageError(
                f"with {counted(self.server_count, 'dedicated server')} on {counted(ranks, 'rank')} there is "
                "nobody to compute; start more ranks, or let the servers compute as well"
            )
        if self.backup >= workers:
            way = f"give at most {workers - 1}" if workers > 1 else "start more ranks"
            raise UsageError(
                f"backup {self.backup} with {counted(workers, 'worker')}: at least one gradient of each batch must "
                f"be waited for; {way}"
            )
        if self.mode == "gossip" and ranks == 1:
            raise UsageError("gossip on one rank has no neighbours to average with; start at least 2 ranks")

    def describe(self, ranks: int) -> str:
        """Return it in words, for the head of a run on so many ranks."""
        if self.mode == "local":
            return f"local, the weights averaged every {counted(self.local_steps, 'step')}"
        if self.mode == "gossip":
            where = "on a ring" if self.neighbours == RING else "in random pairs"
            return f"gossip, the weights averaged with neighbours {where}"
        if not self.uses_servers:
            return "bsp, the gradients summed by all-reduce"
        rule = self.mode
        if self.mode == "ssp":
            rule += f", at most {counted(self.staleness, 'step')} ahead"
        if self.backup:
            workers = len(self.worker_ranks(ranks))
            rule += f", the first {workers - self.backup} of {workers} gradients"
        if self.adapt:
            rule += ", stale gradients count less"
        return f"{rule}; {self._describe_servers()}"

    def _describe_servers(self) -> str:
        count = self.server_count
        if count == 1:
            return f"1 server (rank 0), which {'does nothing else' if self.dedicated else 'computes too'}"
        doing = "do nothing else" if self.dedicated else "compute too"
        return f"{count} servers (ranks 0 to {count - 1}), which {doing}"

    def _check_used(self, setting: str, given: bool, *modes: str) -> None:
        """Refuse a setting that this mode would not use."""
        if given and self.mode not in modes:
            raise UsageError(f"{setting} is for {' or '.join(modes)}, not {self.mode}; leave it out")


def _choose(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{name} {value!r} does not exist; choose from: {', '.join(choices)}")
