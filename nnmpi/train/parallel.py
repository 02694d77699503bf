"""The options that say how the work is laid out over the ranks."""

from dataclasses import dataclass
from typing import Literal

from nnmpi.comm.sizes import parse_bytes
from nnmpi.errors import UsageError
from nnmpi.train.checks import LONG, at_least_one, positive, require
from nnmpi.train.switch import Switch


@dataclass(frozen=True)
class ParallelConfig:
    """How the work is laid out over the ranks."""

    dp: int | Literal["auto"] = "auto"
    """Replicas that share each batch; dp x pp x tp must be the number of MPI ranks, and auto is what is missing."""
    pp: int | Literal["auto"] = "auto"
    """Ranks in each pipeline, which have the layers one after the other (auto: what is missing, else 1)."""
    tp: int | Literal["auto"] = "auto"
    """Ranks that share out each layer (auto: what is missing, else 1)."""
    pipeline: Literal["naive", "gpipe", "1f1b", "interleaved", "zero-bubble", "pipedream"] = "1f1b"
    """Schedule of the pipeline; pipedream updates after every microbatch, with weights that are out of date."""
    virtual_stages: int = 1
    """For --pipeline interleaved: stages on each rank."""
    microbatches: int | None = None
    """Parts in which a batch goes through the pipeline (default: 4 for each of its ranks; with --reduction fixed 16,
    whatever the layout)."""
    split: str = "auto"
    """Where the pipeline is cut: auto balances measured times; or the number of links in each stage, such as 5,4,3."""
    recompute: Literal["never", "always", "except-last"] = "never"
    """Keep only the input of each stage, and compute its activations again for the backward pass: less memory."""
    reduction: Literal["fast", "fixed"] = "fast"
    """fixed: add the gradients of whole microbatches in an order that does not depend on --dp and --pp, so that every
    such layout gives the same bits, for the same number of --microbatches."""
    memory_limit: str | None = None
    """Bytes that a rank may use for parameters, gradients and optimizer state, such as 512MiB; on a CUDA device, for
    everything there."""
    allreduce: Literal[
        "auto", "native", "shared", "ring", "tree", "ps", "halving-doubling", "hierarchical", "ipc", "nccl"
    ] = "auto"
    """How gradients are summed: MPI's own, through shared memory, ring, tree, parameter server ...; auto takes what the
    fitted model predicts to be fastest, or what suits the size. With a CUDA device: ipc reads the device memory of a
    node's other ranks, nccl is NVIDIA's library, with one rank for each GPU."""
    fit: str = "kept"
    """The fitted cost model: a file, or "kept" for the one that `python -m nnmpi.comm fit` has kept for as many ranks,
    if there is one, or "none"."""
    bucket_mb: float | None = None
    """Gradients travel in buckets of this many MiB (default: 4 with overlap, else all in one)."""
    overlap: Switch = "auto"
    """Sum the first buckets while the backward pass still computes the others (auto: with ranks on several nodes, or on
    a device)."""
    fused_update: Switch = "auto"
    """Keep the weights once per node, and let each of its ranks sum the gradients of a part of them and update it
    (auto: on one node, for replicas of a whole model, unless options above say how gradients travel)."""
    check_weights: bool = False
    """After every step, compare a hash of the weights over all ranks (slow; for doubts)."""

    def __post_init__(self) -> None:
        """Check the values; whether dp fits the world is found out when the world is known."""
        for option, ranks in (("--dp", self.dp), ("--pp", self.pp), ("--tp", self.tp)):
            if ranks != "auto":
                at_least_one(option, ranks)
        at_least_one("--virtual-stages", self.virtual_stages)
        if self.microbatches is not None:
            at_least_one("--microbatches", self.microbatches)
        _ = (self.links, self.memory_limit_bytes)
        require(bool(self.fit), '--fit is empty; give a file, "kept" or "none"')
        if self.bucket_mb is not None:
            positive("--bucket-mb", self.bucket_mb, LONG)
        if self.fused_update == "on":
            idle = self.allreduce != "auto" or self.bucket_mb is not None or self.overlap != "auto"
            sentence = "--fused-update sums gradients itself; leave --allreduce, --bucket-mb and --overlap out"
            require(not idle, sentence)

    @property
    def links(self) -> Literal["auto"] | tuple[int, ...]:
        """The number of links in each stage."""
        if self.split == "auto":
            return "auto"
        words = self.split.replace(",", " ").split()
        fits = bool(words) and all(word.isdecimal() and int(word) > 0 for word in words)
        require(fits, f"--split is {self.split!r}; give auto, or numbers of links such as 5,4,3")
        return tuple(map(int, words))

    @property
    def memory_limit_bytes(self) -> int | None:
        """The memory limit as a number."""
        if self.memory_limit is None:
            return None
        try:
            nbytes = parse_bytes(self.memory_limit)
        except UsageError as error:
            raise UsageError(f"--memory-limit: {error}") from None
        except OverflowError:
            raise UsageError("--memory-limit has too many digits; give a number of bytes such as 512MiB") from None
        require(nbytes >= 1, f"--memory-limit is {self.memory_limit}; give at least 1 byte, such as 512MiB")
        return nbytes

    def describe_idle(self) -> str | None:
        """Return the first option given that only a pipeline needs; None if there is none."""
        given = {
            "--pipeline": self.pipeline != "1f1b",
            "--virtual-stages": self.virtual_stages != 1,
            "--split": self.split != "auto",
            "--recompute": self.recompute != "never",
        }
        return next((option for option, is_given in given.items() if is_given), None)
