"""`python -m nnmpi` lists the commands."""

import sys

from nnmpi.version import VERSION

COMMANDS = {
    "train": "train a network: mpirun -n 4 python -m nnmpi.train",
    "run": "train, and start again after each fault, from the last checkpoint",
    "doctor": "what has become of a run; whether this machine is fit for one",
    "report": "a run as a page for a browser: curves, where time went, memory, options",
    "evaluate": "how well a run does on data",
    "predict": "of what class samples and images are",
    "generate": "write on with a language model",
    "export": "a run's weights with PyTorch's names and layouts",
    "verify": "is a layout equal to the serial run?",
    "plan": "which layout of a model takes the least time, on these ranks or on others",
    "speedup": "strong and weak scaling on real or simulated ranks, as a table and a picture",
    "comm": "prove, price, draw and simulate collectives; fit a cost model",
    "schedule": "draw and simulate pipeline schedules",
    "simrun": (
        "run a program written for mpi4py on simulated ranks; deadlocks and other mistakes with"
        " their lines"
    ),
    "exercise": (
        "exercises, and a checker that says which chunk, which rank, after which step is wrong"
    ),
    "grade": "grade solutions of exercises, one or a class; for Gradescope, Classroom 50, JUnit",
    "memory": "draw and price plans of what is computed again within a budget of bytes",
}


def main() -> str:
    """Return the version, and the commands with what they do."""
    lines = [f"  python -m nnmpi.{name:<10} {text}" for name, text in COMMANDS.items()]
    return "\n".join([f"nnmpi {VERSION}", "", *lines, "", "Each has --help."])


if __name__ == "__main__":
    print(f"nnmpi {VERSION}" if "--version" in sys.argv else main())
