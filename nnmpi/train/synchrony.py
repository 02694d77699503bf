"""The options that say how far ranks may drift apart, and how slow some of them are on purpose."""

from dataclasses import dataclass
from typing import Literal

from nnmpi.synchrony.network import LinkSpeed, parse_network
from nnmpi.synchrony.slowdown import Slowdown
from nnmpi.synchrony.sync import DEFAULT_LOCAL_STEPS, DEFAULT_STALENESS, Sync
from nnmpi.train.checks import LONG, at_least_one, not_negative, require
from nnmpi.train.parallel import ParallelConfig

MOST_VIRTUAL_WORKERS = 1024


@dataclass(frozen=True)
class SyncConfig:
    """Whether ranks wait for one another."""

    sync: Literal["bsp", "asp", "ssp", "local", "gossip"] = "bsp"
    """bsp: in every step; asp: never; ssp: when more than --staleness steps ahead of the slowest; local: every
    --local-steps steps, to average weights; gossip: each for its neighbours, to average weights."""
    staleness: int | None = None
    """For --sync ssp: how many steps a worker may be ahead of the slowest (default: 4; 0 is bsp)."""
    local_steps: int | None = None
    """For --sync local: steps that each worker does alone between two averages (default: 8)."""
    servers: int | None = None
    """How many ranks hold the weights and the optimizer's state, and take gradients: the first ones (default: 1 for asp
    and ssp; with bsp gradients are summed by all-reduce)."""
    dedicated_servers: bool = False
    """The servers do nothing else; otherwise they are workers as well."""
    backup: int = 0
    """For --sync bsp: how many of a batch's gradients are not waited for; those that come late are dropped."""
    neighbours: Literal["ring", "random"] = "ring"
    """For --sync gossip: the two on a ring of all ranks, or one at random, another in each step."""
    staleness_lr: bool = False
    """For --sync asp and ssp: gradients that are staler than usual count less."""
    sync_warmup_epochs: int = 0
    """Epochs at the beginning in which the workers stay in step."""
    straggler: str = ""
    """Ranks that are slowed down: "rank=2,factor=3"; or all by chance: "random,probability=0.25,factor=3"; several
    separated by semicolons."""
    pace_ms: float = 0.0
    """Every step takes at least this many milliseconds, as on a slower machine; with --virtual-workers, exactly."""
    virtual_workers: int = 0
    """Play this many workers in one process, in virtual time: the same curve on any machine."""
    network: str = ""
    """For --virtual-workers: the links, such as "alpha_us=50,gbit=10" (default: messages take no time)."""

    def __post_init__(self) -> None:
        """Check the values; whether they fit the ranks is found out when these are known."""
        not_negative("--sync-warmup-epochs", self.sync_warmup_epochs)
        not_negative("--pace-ms", self.pace_ms, LONG)
        not_negative("--virtual-workers", self.virtual_workers, MOST_VIRTUAL_WORKERS)
        if self.servers is not None:
            at_least_one("--servers", self.servers)
        for option, given, mode in (
            ("--staleness", self.staleness, "ssp"),
            ("--local-steps", self.local_steps, "local"),
        ):
            require(given is None or self.sync == mode, f"{option} {given} is for --sync {mode}, not {self.sync}")
        _ = (self.rule, self.slowdown(0), self.links)
        relaxed = self.rule.relaxed
        require(
            relaxed or not self.sync_warmup_epochs, "--sync-warmup-epochs does nothing for --sync bsp; leave it out"
        )
        virtual = self.virtual_workers > 0
        require(
            virtual or not self.network, "--network is for --virtual-workers; messages between ranks take their time"
        )
        require(
            not virtual or self.pace_ms > 0, "--virtual-workers needs the time of a step; give --pace-ms, such as 10"
        )

    @property
    def rule(self) -> Sync:
        """What the options mean together."""
        return Sync(
            self.sync,
            DEFAULT_STALENESS if self.staleness is None else self.staleness,
            DEFAULT_LOCAL_STEPS if self.local_steps is None else self.local_steps,
            self.servers or 0,
            self.dedicated_servers,
            self.backup,
            self.neighbours,
            self.staleness_lr,
        )

    def ranks(self, size: int) -> int:
        """Return how many ranks the run has, or plays, in a job of this size."""
        return self.rule.ranks_of(self.virtual_workers) if self.virtual_workers else size

    @property
    def links(self) -> LinkSpeed:
        """The network of virtual time."""
        return parse_network(self.network) if self.network else LinkSpeed()

    @property
    def in_segments(self) -> bool:
        """Whether ranks meet only now and then."""
        return self.rule.relaxed or self.virtual_workers > 0

    def slowdown(self, seed: int) -> Slowdown:
        """Return who is slow."""
        return Slowdown.parse(self.straggler, seed)

    def check(self, parallel: ParallelConfig) -> None:
        """Refuse what does not go together with replicas that are not in step.

        Raises:
            UsageError: naming the option.
        """
        if not self.in_segments:
            return
        what = f"--virtual-workers {self.virtual_workers}" if self.virtual_workers else f"--sync {self.sync}"
        if self.servers and not self.virtual_workers:
            what += f" with --servers {self.servers}"
        plain = ParallelConfig()
        for option, given, why in (
            ("--pp", parallel.pp not in ("auto", 1), "every worker has the whole model"),
            ("--tp", parallel.tp not in ("auto", 1), "every worker has the whole model"),
            ("--fused-update", parallel.fused_update == "on", "weights are not updated in step"),
            ("--reduction", parallel.reduction != plain.reduction, "sums depend on who comes first"),
            ("--memory-limit", parallel.memory_limit is not None, "every worker has the whole model"),
            ("--check-weights", parallel.check_weights, "workers' weights differ between two meetings"),
            ("--allreduce", parallel.allreduce != plain.allreduce, "no gradients are summed by all-reduce"),
            ("--bucket-mb", parallel.bucket_mb is not None, "no gradients are summed by all-reduce"),
            ("--overlap", parallel.overlap != "auto", "no gradients are summed by all-reduce"),
        ):
            require(not given, f"{option} does not go with {what}: {why}; leave it out")
