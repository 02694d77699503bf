"""gloo's all-reduce alone, without MPI in its processes, as a training program under PyTorch has it:

    torchrun --nproc-per-node 2 -- benchmarks/collectives/alone.py [--min ... --max ... --check --json FILE]

Beside other contestants gloo is slower: their polling takes the cores from its threads. `tables.py` takes the better
figure of this and of `--algorithms ...,gloo`.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2])  # the checkout, so that the modules here have their full names

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as distributed  # noqa: E402
from numpy.typing import NDArray  # noqa: E402

from benchmarks.collectives.contestants import CollectiveCall  # noqa: E402
from benchmarks.collectives.gloo import gloo_sum, join, stop_gloo  # noqa: E402
from benchmarks.collectives.options import ALL_REDUCE, GLOO, NO_MPI, parse  # noqa: E402
from benchmarks.collectives.pattern import Pattern  # noqa: E402
from benchmarks.collectives.rows import TABLE, CallTimes, build_rows, content  # noqa: E402
from benchmarks.collectives.timing import gather, never, nothing, take  # noqa: E402
from benchmarks.harness import command, results  # noqa: E402
from benchmarks.harness.machine import machine_facts  # noqa: E402
from nnmpi.backend.backend import numpy_backend  # noqa: E402
from nnmpi.comm.collective import ALL_REDUCE as SUM  # noqa: E402


class GlooRanks:
    """The processes that torchrun has started."""

    def __init__(self) -> None:
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()

    def barrier(self) -> None:
        """Return when every rank has come here."""
        distributed.barrier()

    def gather_floats(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return every rank's (n,) numbers on every rank: (ranks, n)."""
        everyones = [torch.empty(values.size, dtype=torch.float64) for _ in range(self.size)]
        distributed.all_gather(everyones, torch.from_numpy(np.ascontiguousarray(values)))
        return np.stack([each.numpy() for each in everyones])


def measure(options: argparse.Namespace, ranks: GlooRanks, nbytes: int) -> list[CallTimes]:
    """Return gloo's row at one size. Collective.

    Args:
        options: of the command line.
        ranks: all processes.
        nbytes: of each rank's buffer.
    """
    array = np.zeros(nbytes // np.dtype(options.dtype).itemsize, options.dtype)
    pattern = Pattern(SUM, ranks.rank, ranks.size, array.size, options.dtype, numpy_backend())
    entry = CollectiveCall(GLOO, pattern, array, gloo_sum(array))
    verify = _verify if options.check else nothing
    stamps = gather(take([entry], ranks, options.iterations, options.budget_s, verify, never), ranks)
    return build_rows([GLOO], stamps, nbytes, ALL_REDUCE, True, {}, {})


def _verify(entry: Any, call: int) -> None:
    wrong = entry.first_wrong(call)
    if wrong is not None:
        raise SystemExit(f"gloo's element {wrong.index} is {wrong.found:g} and must be {wrong.expected:g}")


def main(words: Sequence[str]) -> int:
    """Measure all sizes, print the rows, and write them; return the exit status."""
    return command.run("alone.py", lambda: _run(parse(["--algorithms", GLOO, *words])))


def _run(options: argparse.Namespace) -> None:
    results.check_writable("--json", options.json)
    join(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://")
    ranks, rows = GlooRanks(), list[CallTimes]()
    header = {"ranks": ranks.size, "nodes": 1, "mpi": NO_MPI, "operation": ALL_REDUCE, "dtype": options.dtype}
    header |= {"machine": machine_facts(), "fit": "no fit", "torch": torch.__version__, "checked": options.check}
    for number, nbytes in enumerate(options.sizes, start=1):
        found = measure(options, ranks, nbytes)
        rows += found
        if ranks.rank == 0:
            print(*([TABLE.head()] if number == 1 else []), *map(TABLE.line, found), sep="\n", flush=True)
            results.write(options.json, content(header, rows, finished=number == len(options.sizes)))
    stop_gloo()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
