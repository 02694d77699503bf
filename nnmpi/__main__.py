"""`nnmpi` lists the commands."""

import sys

from nnmpi.base.version import VERSION

COMMANDS = {
    "train": "train a network: mpirun -n 4 nnmpi train",
    "run": "train, and restart after each fault from the last checkpoint",
    "doctor": "diagnose a run, or this machine and its MPI",
    "report": "make a page of a run: curves, where time went, memory, options",
    "evaluate": "evaluate a run on data",
    "predict": "predict the classes of samples and images",
    "generate": "generate text with a language model",
    "export": "export a run's weights with PyTorch's names and layouts",
    "verify": "compare a layout with the serial run",
    "plan": "find the fastest layout of a model, for these ranks or others",
    "speedup": "measure strong and weak scaling on real or simulated ranks",
    "comm": "prove, price, draw and simulate collectives; fit a cost model",
    "schedule": "draw and simulate pipeline schedules",
    "simrun": "run an mpi4py program on simulated ranks; find its deadlocks",
    "exercise": "check exercises; a mistake is named by chunk, rank and step",
    "grade": "grade solutions of exercises, for Gradescope, Classroom 50, JUnit",
    "memory": "draw and price recomputation plans within a memory budget",
}


def main() -> str:
    """Return the version, and the commands with what they do."""
    lines = [f"  python -m nnmpi.{name:<10} {text}" for name, text in COMMANDS.items()]
    return "\n".join([f"nnmpi {VERSION}", "", *lines, "", "Each takes --help."])


if __name__ == "__main__":
    print(f"nnmpi {VERSION}" if "--version" in sys.argv else main())
