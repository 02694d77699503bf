"""`python -m nnmpi.run -n 4 -- --dataset mnist --save-every 100steps`: see `--help`."""

import argparse
import sys
from collections.abc import Sequence
from math import inf, prod
from pathlib import Path

from nnmpi.command import HelpAsked, Parser, printable, say
from nnmpi.errors import UsageError
from nnmpi.run.launching import find_launcher, given_hosts
from nnmpi.run.supervisor import SupervisedRun, Supervisor, without
from nnmpi.train.cli import parse
from nnmpi.train.folder import default_folder

PROGRAM = "python -m nnmpi.run"
DESCRIPTION = """Train, and start again from the last checkpoint after each fault: a rank that is killed, a job that
stands still, a host that is lost. What follows -- are the options of python -m nnmpi.train. Inside a job of Slurm's the
ranks are started by srun, elsewhere by mpirun."""


def main(words: Sequence[str]) -> str:
    """Supervise a training, and return what there is to say at its end.

    Raises:
        UsageError: for wrong options, of this command or of the train command.
        GaveUp: see `Supervisor.run`.
    """
    own, train = _split(words)
    options = _read_own(own)
    try:
        config = parse(train)
    except HelpAsked as asked:
        return str(asked)
    if config.sync.simulate:
        raise UsageError("--simulate trains in one process, which needs no supervisor; leave it out")
    layout = config.parallel
    folder = config.run.resume or config.run.out or default_folder(config)
    replica = prod(ranks for ranks in (layout.pp, layout.tp, layout.sp) if isinstance(ranks, int))
    if options.ranks % replica:
        raise UsageError(f"-n {options.ranks} is no multiple of the {replica} ranks that hold the model once")
    hosts = tuple(filter(None, options.hosts.split(","))) or tuple(given_hosts())
    plan = SupervisedRun(
        words=tuple(without(("--out", "--resume"), train)),
        folder=Path(folder),
        resumes=config.run.resume is not None,
        ranks=options.ranks,
        replica=replica,
        fewest=2 if config.sync.sync == "gossip" else 1,
        hosts=hosts,
        restarts=options.restarts,
        start_limit_s=options.start_limit,
    )
    return "nnmpi.run: " + Supervisor(plan, find_launcher(options.ranks, hosts), _say).run()


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words before and behind the first --."""
    listed = list(words)
    at = listed.index("--") if "--" in listed else len(listed)
    return listed[:at], listed[at + 1 :]


def _read_own(words: Sequence[str]) -> argparse.Namespace:
    """Return the options of this command, checked."""
    options, unknown = _parser().parse_known_args(words)
    if unknown:
        raise UsageError(f"{unknown[0]} is not an option of {PROGRAM}; those of the train command stand behind --")
    if options.ranks < 1:
        raise UsageError(f"-n {options.ranks} is less than 1 rank")
    if options.restarts < 0:
        raise UsageError(f"--restarts is {options.restarts}; give 0 or more")
    if not 0 <= options.start_limit < inf:
        raise UsageError(f"--start-limit is {options.start_limit}; give a number of seconds, or 0 for no limit")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = Parser(PROGRAM, description=DESCRIPTION, allow_abbrev=False, usage=f"{PROGRAM} [options] -- TRAIN OPTIONS")
    parser.add_argument("-n", "--ranks", type=int, default=1, help="how many ranks train (default: 1)")
    parser.add_argument(
        "--restarts",
        type=int,
        default=10,
        help="how many starts in a row may bring no new checkpoint before it gives up (default: 10)",
    )
    parser.add_argument(
        "--hosts",
        default="",
        help="host names with commas between them; before each start they are asked whether they answer, and those "
        "that do not are left out with their ranks (default: the launcher's choice; in a job of Slurm's all of its)",
    )
    parser.add_argument(
        "--start-limit",
        type=float,
        default=600.0,
        help="seconds in which ranks must have come up and read their data, or they are started again; 0: no limit "
        "(default: 600)",
    )
    return parser


def _say(text: str) -> None:
    print(f"nnmpi.run: {printable(text)}", flush=True)


if __name__ == "__main__":
    sys.exit(say(main))
