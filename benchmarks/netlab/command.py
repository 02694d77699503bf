"""The command line: `python benchmarks/netlab bench | steps | compress | run`."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.collectives.command import ALL_REDUCE, OPERATIONS
from benchmarks.harness import command, results
from benchmarks.harness.command import Parser, positive_count
from benchmarks.netlab.bench import bench
from benchmarks.netlab.compress import WAYS, compress
from benchmarks.netlab.compress import check as check_compressed
from benchmarks.netlab.lab import MAX_HOSTS, Speed, check_possible, lab_of
from benchmarks.netlab.launch import environment
from benchmarks.netlab.steps import CASES, check, steps
from nnmpi.base.errors import UsageError
from nnmpi.base.units import parse_bytes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its status: 2 for wrong use, 1 for a failure."""

    def work() -> int | None:
        parser = _parser()
        options = parser.parse_args(list(sys.argv[1:] if arguments is None else arguments))
        if options.act is None:
            parser.error("a command is missing: bench, steps, compress or run")
        act: Callable[[argparse.Namespace], int | None] = options.act
        results.check_writable("--json", getattr(options, "json", None))
        return act(options)

    for number in (signal.SIGTERM, signal.SIGHUP):  # exit through the lab's cleanup
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    return command.run("netlab", work)


def _run(options: argparse.Namespace) -> int:
    """Make a lab, run a command on its head, where mpirun reaches the hosts; return its status."""
    if not options.command:
        raise UsageError("run needs a command: run mpirun ... or run sh")
    with lab_of(options.hosts, options.rate) as lab:
        process = subprocess.Popen(
            (*lab.enter_head(), *options.command), env=environment(lab.agent)
        )
        # Ctrl-C belongs to the command, which may be a shell
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return process.wait()


CHECKS = "bench --sizes 64k --algorithms ring,tree", "steps --cases ring"


def _check(options: argparse.Namespace) -> None:
    """Check what is simulated; and, where a lab is possible, measure on two hosts."""
    check()
    check_compressed()
    try:
        check_possible()
    except UsageError as error:
        return command.say(f"nothing is measured: {error}")
    for words in CHECKS:
        least = (*words.split(), "--hosts", "2", "--rate", "200mbit", "--repeats", "1")
        given = _parser().parse_args(least)
        given.act(given)
    return None


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="netlab", description="A cluster of hosts with slow links on this machine."
    )
    text = "a step that is simulated; and, where a lab is possible, a few measurements"
    parser.add_argument("--check", action="store_const", dest="act", const=_check, help=text)
    commands = parser.add_subparsers(metavar="COMMAND")

    def add(
        name: str, act: Callable[[argparse.Namespace], int | None], text: str
    ) -> argparse.ArgumentParser:
        result = commands.add_parser(name, help=text, description=text)
        result.set_defaults(act=act)
        return result

    read = command.list_of
    rates = read(Speed)
    text = "make a lab, measure collectives across it beside their prediction, take it down"
    benches = add("bench", bench, text)
    command.add_options(
        benches,
        ("--operation", command.one_of(*OPERATIONS), ALL_REDUCE, ", ".join(OPERATIONS)),
        ("--hosts", read(_hosts), "2,4,8,16", "numbers of hosts"),
        ("--rate", rates, "100mbit", "rates of the links"),
        ("--sizes", read(_size), "1m,2m", "bytes of the buffers"),
        ("--algorithms", read(str), None, "names (default: all of the operation but hierarchical)"),
        ("--repeats", positive_count, "5", "times that each is measured"),
    )
    text = "training steps over the links beside the same command with --simulate"
    stepping, names = add("steps", steps, text), [case.name for case in CASES]
    command.add_options(
        stepping,
        ("--hosts", read(_hosts), None, "only these numbers of hosts (default: all of each case)"),
        ("--rate", rates, "100mbit,200mbit", "rates of the links"),
        ("--cases", read(command.one_of(*names)), ",".join(names), "ways of training"),
        ("--repeats", positive_count, "3", "runs of each"),
    )
    text = "training with compressed gradients beside plain sums, to the end"
    compressing = add("compress", compress, text)
    command.add_options(
        compressing,
        ("--hosts", _hosts, "4", "number of hosts"),
        ("--rate", rates, "100mbit,1gbit", "rates of the links"),
        ("--ways", read(command.one_of(*WAYS)), ",".join(WAYS), "ways to sum gradients"),
        ("--data-dir", Path, None, "folder with MNIST's files (default: they are downloaded)"),
    )
    for item in (stepping, benches, compressing):
        text = "an MCA parameter, or a variable of MPICH's"
        item.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help=text)
        text = "file for the result, what there is of it"
        command.add_options(item, ("--json", command.file, None, text))
    run = add("run", _run, "run a command on the head of a lab, where mpirun is started")
    command.add_options(
        run,
        ("--rate", Speed, "100mbit", "rate of the links"),
        ("--hosts", _hosts, "4", "number of hosts"),
    )
    run.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND...")
    return parser


def _hosts(word: str) -> int:
    if not word.isdecimal() or not 2 <= int(word) <= MAX_HOSTS:
        raise UsageError(f"{word!r} is not a number of hosts from 2 to {MAX_HOSTS}")
    return int(word)


def _size(word: str) -> int:
    nbytes = parse_bytes(word)
    if nbytes < 4 or nbytes % 4:
        raise UsageError(f"a buffer of float32 has a multiple of 4 bytes, not {nbytes}")
    return nbytes
