"""`python benchmarks/scaling`: simulated time of all all-reduces by ranks, on two machines.

A full run takes 75 s; --max-ranks 512 or --sizes 1k,1m shorten it. See README.md.
"""

import sys
from pathlib import Path

# the checkout, so that the modules here have their full names
sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.harness import command  # noqa: E402
from benchmarks.harness.command import Parser, positive_count  # noqa: E402
from nnmpi.base.units import format_bytes, format_seconds, parse_bytes  # noqa: E402
from nnmpi.comm.algorithms.registry import ALGORITHMS, find_collective  # noqa: E402
from nnmpi.comm.duration import price  # noqa: E402
from nnmpi.comm.machine import Curve, Link, Machine, blocks  # noqa: E402

ODD_RANKS = (3, 6, 12, 24, 48, 100, 384, 1000)  # not all jobs have a power of two
INSIDE = Link.line(0.5e-6, 1 / 10e9)  # through memory: 0.5 us, 10 GB/s for each pair of ranks
ACROSS = Link.line(2e-6, 1 / 12.5e9)  # 100 Gbit/s for all of a node's ranks together
ADDING = Curve.line(0.0, 1 / 50e9)  # 50 GB/s in cache
MACHINES = {
    "flat: alpha 2 us, 12.5 GB/s, adding 50 GB/s, a link for every rank": lambda _: Machine(
        ACROSS, None, None, ADDING
    ),
    "cluster: nodes of 8 ranks, inside 0.5 us and 10 GB/s, between nodes 2 us and "
    "12.5 GB/s for all ranks of a node together, adding 50 GB/s": lambda ranks: Machine(
        INSIDE, ACROSS, blocks(ranks, 8), ADDING
    ),
}
EQUAL = 1 + 1e-9  # rounding


def run() -> None:
    """Simulate and print."""
    parser = Parser("python benchmarks/scaling", description="Simulated all-reduces by ranks.")
    command.add_options(
        parser,
        ("--max-ranks", positive_count, "4096", "the most ranks"),
        ("--sizes", command.list_of(parse_bytes), "1k,64k,1m,64m", "of messages"),
    )
    parser.add_argument("--check", action="store_true", help="12 ranks at the most, one size")
    options = parser.parse_args()
    if options.check:
        options.max_ranks, options.sizes = 12, (2**16,)
    counts = sorted({*(1 << bit for bit in range(1, 13)), *ODD_RANKS})
    for description, build in MACHINES.items():
        print(description)
        for nbytes in options.sizes:
            print(f"\n{format_bytes(nbytes)}    (* the fastest)")
            print("  ".join([f"{'ranks':>6}", *(f"{name:>16}" for name in ALGORITHMS)]))
            for ranks in counts:
                if ranks <= options.max_ranks:
                    machine = build(ranks)
                    row = [
                        price(
                            find_collective("all-reduce", name, machine.nodes),
                            ranks,
                            nbytes,
                            machine,
                        )
                        for name in ALGORITHMS
                    ]
                    cells = [
                        f"{format_seconds(item)} {' *'[item <= min(row) * EQUAL]}" for item in row
                    ]
                    print(
                        "  ".join([f"{ranks:6}", *(f"{cell:>16}" for cell in cells)]).rstrip(),
                        flush=True,
                    )
        print()


if __name__ == "__main__":
    sys.exit(command.run("python benchmarks/scaling", run))
