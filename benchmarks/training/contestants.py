"""Who takes part: each way to run a case, as a value that is passed to its processes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.training.cases import BLOCK, CNN, GPT, Case

NNMPI, TORCH = "nnmpi", "torch"
# The groups of which the fastest one counts; EAGER is those of PURE that are not compiled.
PURE, JIT, STOCK, TUNED = "nnmpi", "nnmpi jit", "PyTorch", "PyTorch, tuned malloc"
EAGER = "nnmpi eager"
SHARDED, FSDP = "nnmpi zero 3", "PyTorch FSDP2"  # with --sharded alone
GROUPS = (PURE, JIT, STOCK, TUNED, SHARDED, FSDP)
# How nnmpi's ranks exchange gradients.
WORKER, FUSED, PARALLEL = "worker", "fused", "parallel"
CONTIGUOUS, CHANNELS_LAST = "contiguous", "channels_last"
SDPA, EXPLICIT = "sdpa", "explicit"


@dataclass(frozen=True)
class Contestant:
    """One way to run a case on so many ranks.

    Attributes:
        side: NNMPI or TORCH.
        case: its name.
        ranks: processes of one thread each.
        exchange: of nnmpi on several ranks: `Worker`, `Worker` with the fused update, or `DataParallel` in a loop.
        compiled, jit: whether nnmpi replays a recorded step, and uses compiled kernels.
        layout: of PyTorch's images.
        attention: of PyTorch's blocks.
        fused_sgd, bucket_view: options of PyTorch's SGD and of DistributedDataParallel.
        tuned: whether malloc keeps freed memory by the variables of `environment.TUNED_MALLOC`.
        sharded: whether the ranks share out weights, gradients and state: ZeRO 3 here, `fully_shard` there.
        dtype: float64 for the reference that everybody is compared with.
    """

    side: str
    case: str
    ranks: int = 1
    exchange: str = ""
    compiled: bool = False
    jit: bool = False
    layout: str = ""
    attention: str = ""
    fused_sgd: bool = False
    bucket_view: bool = False
    tuned: bool = False
    sharded: bool = False
    dtype: str = "float32"

    @property
    def name(self) -> str:
        """Its side and what distinguishes it there; unique in a field."""
        words = [self.exchange, "compiled" * self.compiled, "jit" * self.jit, self.layout, self.attention]
        words += ["fused SGD" * self.fused_sgd, "bucket view" * self.bucket_view, "tuned malloc" * self.tuned]
        words += ["sharded" * self.sharded]
        if self.dtype != "float32":
            words.append(self.dtype)
        return " ".join([self.side, *filter(None, words)])

    @property
    def group(self) -> str:
        """The group in which it competes."""
        if self.sharded:
            return SHARDED if self.side == NNMPI else FSDP
        if self.side == NNMPI:
            return JIT if self.jit else PURE
        return TUNED if self.tuned else STOCK


def nnmpi_field(case: Case, ranks: int, compiled: bool, jit: bool, reduced: bool = False) -> list[Contestant]:
    """Return nnmpi's ways.

    Args:
        reduced: leave out what other ways contain: on several ranks the plain loop, and a Worker with compiled kernels.
        compiled, jit: whether nnmpi can do these here. A Worker replays by itself: what is compiled is a loop.
    """
    ways = [WORKER, FUSED, PARALLEL] if ranks > 1 else [""]
    plain = [Contestant(NNMPI, case.name, ranks, exchange=way) for way in ways]
    if compiled:
        plain += [replace(each, compiled=True) for each in plain if each.exchange in ("", PARALLEL)]
    if reduced and compiled and ranks > 1:
        plain = [each for each in plain if each.compiled or each.exchange != PARALLEL]
    if case.large:
        plain = [each for each in plain if each.compiled] or plain
    faster = [replace(each, jit=True) for each in plain if jit and not (reduced and each.exchange == WORKER)]
    return plain + faster


def torch_field(case: Case, ranks: int, reduced: bool = False) -> list[Contestant]:
    """Return PyTorch's ways: layouts, attentions, optimizers or buckets; then those with tuned malloc.

    Args:
        reduced: only the plainest one.
    """
    plain = [Contestant(TORCH, case.name, ranks)]
    if case.model == CNN:
        plain = [replace(each, layout=layout) for each in plain for layout in (CONTIGUOUS, CHANNELS_LAST)]
    if case.model in (BLOCK, GPT):
        plain = [replace(each, attention=way) for each in plain for way in (SDPA, EXPLICIT)]
    if reduced:
        return plain[-1:]
    other = [replace(each, bucket_view=True) if ranks > 1 else replace(each, fused_sgd=True) for each in plain]
    if case.large:
        return [other[0], replace(other[0], tuned=True)]
    return [*plain, *other, *(replace(each, tuned=True) for each in (plain if ranks == 1 else other))]


def sharded_field(case: Case, ranks: int, torch: bool) -> list[Contestant]:
    """Return replicas and ranks that share all out, of nnmpi's `Worker` and of PyTorch."""
    plain = [Contestant(NNMPI, case.name, ranks, exchange=WORKER), *(torch_field(case, ranks)[:1] if torch else [])]
    fused = replace(plain[0], exchange=FUSED)
    return [*plain, fused, *(replace(each, sharded=True) for each in plain)]


def reference(case: Case, torch: bool) -> Contestant:
    """Return the one in float64 whose loss and gradients are taken for right."""
    way = (torch_field(case, 1, reduced=True) if torch else nnmpi_field(case, 1, False, False))[0]
    return replace(way, dtype="float64", attention=EXPLICIT if way.attention else "")
