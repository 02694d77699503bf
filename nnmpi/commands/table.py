"""The commands by group, and the module of each."""

import sys
from collections.abc import Sequence

from nnmpi.base.command import say, suggest
from nnmpi.base.errors import UsageError, shortened
from nnmpi.base.version import VERSION
from nnmpi.base.wings import module_of

# {title: {module: what the command does}}; a command has its module's last name.
GROUPS = {
    "Train, and use a run": {
        "train": "train a network: mpirun -n 4 nnmpi train",
        "lab.run": "train, and restart after each fault from the last checkpoint",
        "lab.report": "make a page of runs: curves, where time went, options",
        "commands.evaluate": "evaluate a run on data",
        "commands.predict": "predict the classes of samples and images",
        "commands.generate": "generate text with a language model",
        "commands.export": "export a run's weights with PyTorch's names and layouts",
    },
    "Choose a layout, and look after runs and machines": {
        "lab.plan": "find the fastest layout of a model, for these ranks or others",
        "lab.verify": "compare a layout with the serial run",
        "lab.speedup": "measure strong and weak scaling on real or simulated ranks",
        "lab.doctor": "diagnose a run, or this machine and its MPI",
        "lab.comm": "prove, price, draw and simulate collectives; fit a cost model",
        "lab.schedule": "draw and simulate pipeline schedules",
        "lab.memory": "draw and price recomputation plans within a memory budget",
    },
    "Teach and learn": {
        "teaching.exercise": "check exercises; a mistake is named by chunk, rank and step",
        "teaching.grade": "grade solutions, for Gradescope, Classroom 50 and JUnit",
        "teaching.simrun": "run an mpi4py program on simulated ranks; find its deadlocks",
    },
}
COMMANDS = {path.rpartition(".")[2]: path for group in GROUPS.values() for path in group}


def find_command(name: str) -> str:
    """Return the name of a command's module.

    Raises:
        UsageError: for a word that is no command, or one of a wing that this installation lacks.
    """
    if name not in COMMANDS:
        raise UsageError(
            f"{shortened(name)} is no command of nnmpi{suggest(name, COMMANDS)}; nnmpi alone lists"
            " them"
        )
    return module_of(COMMANDS[name])


def list_commands(words: Sequence[str]) -> str:
    """Return the version, and the commands with what they do.

    Raises:
        UsageError: see `find_command`.
    """
    if "--version" in words:
        return f"nnmpi {VERSION}"
    if words and words[0] not in ("-h", "--help", "help"):
        find_command(words[0])
    lines = [f"nnmpi {VERSION}"]
    for title, group in GROUPS.items():
        rows = [(path.rpartition(".")[2], text) for path, text in group.items()]
        lines += ["", f"{title}:", *(f"  nnmpi {name:<10} {text}" for name, text in rows)]
    return "\n".join([*lines, "", "Each takes --help."])


def refuse_old_spelling(words: Sequence[str]) -> None:
    """End a program that begins as `python -m nnmpi.verify`, a spelling of former versions.

    Args:
        words: of the interpreter's command line.
    """
    module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
    name = module.removeprefix("nnmpi.")
    if name in COMMANDS and module == f"nnmpi.{name}" and name != "train":

        def refuse(_words: Sequence[str]) -> str:
            raise UsageError(f"python -m {module} is now nnmpi {name}, or python -m nnmpi {name}")

        sys.exit(say(refuse))
