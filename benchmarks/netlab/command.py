"""The command line: `python benchmarks/netlab bench | steps | run`."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence

from benchmarks.collectives.command import ALL_REDUCE, OPERATIONS
from benchmarks.harness import command, results
from benchmarks.netlab.bench import bench
from benchmarks.netlab.lab import MAX_HOSTS, Speed, made
from benchmarks.netlab.launch import environment
from benchmarks.netlab.steps import CASES, steps
from nnmpi.command import Parser
from nnmpi.errors import UsageError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its status: 2 for wrong use, 1 for a failure."""

    def work() -> int | None:
        options = _parser().parse_args(list(sys.argv[1:] if arguments is None else arguments))
        act: Callable[[argparse.Namespace], int | None] = options.act
        results.check_writable("--json", getattr(options, "json", None))
        return act(options)

    for number in (signal.SIGTERM, signal.SIGHUP):  # by way of what takes down the lab
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    return command.run("netlab", work)


def _run(options: argparse.Namespace) -> int:
    """Make a lab, run a command on its head, where mpirun finds the hosts, and return its
    status.
    """
    if not options.command:
        raise UsageError("run needs a command: run mpirun ... or run sh")
    with made(options.hosts, options.rate) as lab:
        process = subprocess.Popen(
            (*lab.enter_head(), *options.command), env=environment(lab.agent)
        )
        # the terminal's Ctrl-C is for the command, which may be a shell
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return process.wait()


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="netlab", description="A cluster of hosts with slow links on this machine."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(
        name: str, act: Callable[[argparse.Namespace], int | None], text: str
    ) -> argparse.ArgumentParser:
        result = commands.add_parser(name, help=text, description=text)
        result.set_defaults(act=act)
        return result

    read, positive = command.each, command.positive
    benches = add(
        "bench",
        bench,
        "make a lab, measure collectives across it beside their prediction, take it down",
    )
    for name, reader, default, text in (
        ("--operation", command.one_of(*OPERATIONS), ALL_REDUCE, ", ".join(OPERATIONS)),
        ("--hosts", read(_hosts), "2,4,8,16", "numbers of hosts (default %(default)s)"),
        ("--rate", read(Speed), "100mbit", "rates of the links (default %(default)s)"),
        ("--sizes", read(_size), "1m,2m", "bytes of the buffers (default %(default)s)"),
        ("--algorithms", read(str), None, "names (default: all of the operation but hierarchical)"),
        ("--repeats", positive, 5, "times that each is measured (default %(default)s)"),
    ):
        benches.add_argument(
            name, type=reader, default=default, metavar=name[2:].upper(), help=text
        )
    stepping = add(
        "steps", steps, "training steps over the links beside the same command with --simulate"
    )
    names, everything = (
        read(command.one_of(*(case.name for case in CASES))),
        ",".join(case.name for case in CASES),
    )
    stepping.add_argument(
        "--hosts", type=read(_hosts), help="only these numbers of hosts (default: all of each case)"
    )
    stepping.add_argument(
        "--rate", type=read(Speed), default="100mbit,200mbit", help="default %(default)s"
    )
    stepping.add_argument("--cases", type=names, default=everything, help="default %(default)s")
    stepping.add_argument(
        "--repeats", type=positive, default=3, help="runs of each (default %(default)s)"
    )
    for item in (stepping, benches):
        text = "an MCA parameter, or a variable of MPICH's"
        item.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help=text)
        item.add_argument(
            "--json",
            type=command.file,
            metavar="FILE",
            help="write the result, what there is of it",
        )
    run = add("run", _run, "run a command on the head of a lab, where mpirun is started")
    run.add_argument(
        "--rate", type=command.one(Speed), default="100mbit", help="default %(default)s"
    )
    run.add_argument("--hosts", type=_hosts, default=4, help="default %(default)s")
    run.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND...")
    return parser


def _hosts(word: str) -> int:
    if not word.isdecimal() or not 2 <= int(word) <= MAX_HOSTS:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number of hosts from 2 to {MAX_HOSTS}")
    return int(word)


def _size(word: str) -> int:
    nbytes = command.nbytes(word)
    if nbytes < 4 or nbytes % 4:
        raise UsageError(f"a buffer of float32 has a multiple of 4 bytes, not {nbytes}")
    return nbytes
