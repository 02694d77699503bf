"""The command line: `python benchmarks/netlab bench | steps | up | run | down`."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from benchmarks.collectives.command import ALL_REDUCE, OPERATIONS
from benchmarks.harness import command, results
from benchmarks.netlab.bench import LabRun, Plan
from benchmarks.netlab.build import MAX_HOSTS, up
from benchmarks.netlab.lab import find, sweep, take_down
from benchmarks.netlab.launch import LIBRARIES, environment, find_library, parse_settings
from benchmarks.netlab.link import Speed
from benchmarks.netlab.process import children_of
from benchmarks.netlab.shell import check_machine
from benchmarks.netlab.state import State
from benchmarks.netlab.steps import CASES, SETTINGS, StepsRun
from nnmpi.comm.algorithms.registry import ALGORITHMS, COLLECTIVES, HIERARCHICAL, NATIVE, find_collective
from nnmpi.command import Parser
from nnmpi.errors import UsageError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its status: 2 for wrong use, 1 for a failure, 128 and the number for a signal."""

    def work() -> int:
        options = parse(sys.argv[1:] if arguments is None else arguments)
        act: Callable[[argparse.Namespace], int] = options.act
        check_machine()
        return act(options)

    try:
        with _signals_unwind():
            return command.run("netlab", work)
    except _Stopped as stopped:
        print(f"netlab: ended by {signal.Signals(stopped.number).name}", file=sys.stderr)
        return 128 + stopped.number


class _Stopped(BaseException):
    """A signal asked this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def _signals_unwind() -> Iterator[None]:
    """Let the first signal unwind the stack, and with it take down the lab; later ones must not disturb that."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def stop(number: int, frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise _Stopped(number)

    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command; `act` is what it does.

    Raises:
        UsageError: for an unknown command, option or value.
    """
    return _parser().parse_args(list(arguments))


def make_plan(options: argparse.Namespace) -> Plan:
    """Return the plan of the options of `bench`."""
    names = tuple(how for what, how in COLLECTIVES if what == options.operation)
    algorithms = options.algorithms or tuple(name for name in (*names, NATIVE) if name != HIERARCHICAL)
    for name in algorithms:
        if name != NATIVE:
            find_collective(options.operation, name)
    return Plan(options.operation, options.hosts, options.rate, options.sizes, algorithms, options.repeats, options.cut)


def _bench(options: argparse.Namespace) -> int:
    plan = make_plan(options)
    results.check_writable("--json", options.json)
    library, version = find_library(options.mpi)
    settings = parse_settings(options.set)
    sweep()
    run = LabRun(plan, f"{LIBRARIES[library].vendor} {version}", library, settings)
    try:
        run.run()
    finally:
        if run.rows:
            run.save(options.json)
    return 0


def _steps(options: argparse.Namespace) -> int:
    results.check_writable("--json", options.json)
    library, version = find_library(options.mpi)
    cases = [case for case in CASES if case.name in options.cases]
    places = [
        (speed, hosts, case)
        for speed in options.rate
        for case in cases
        for hosts in case.hosts
        if options.hosts is None or hosts in options.hosts
    ]
    if not places:
        raise UsageError("none of these cases is run on so many hosts; leave --hosts or --cases out")
    sweep()
    run = StepsRun(
        f"{LIBRARIES[library].vendor} {version}", library, {**SETTINGS[library], **parse_settings(options.set)}
    )
    try:
        run.run(places, options.repeats)
    finally:
        run.save(options.json)
    return 0


def _up(options: argparse.Namespace) -> int:
    sweep()
    lab = up(State(options.name), options.hosts, options.rate)
    print(f"up: {len(lab.hosts)} hosts, links of {options.rate.rate}; launch agent: {lab.agent}")
    return 0


def _run(options: argparse.Namespace) -> int:
    """Run a command on the head, where mpirun finds the hosts, and return its status; a signal is handed on to it."""
    if not options.command:
        raise UsageError("run needs a command: run mpirun ... or run sh")
    lab = find(State(options.name))
    process = subprocess.Popen((*lab.enter_head(), *options.command), env=environment(os.environ, lab.agent))
    try:
        return process.wait()
    except _Stopped as stopped:
        for child in children_of(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, stopped.number)
        process.wait()
        raise


def _down(options: argparse.Namespace) -> int:
    state = State(options.name)
    names = [state.name] if take_down(state) else []
    names += sweep()
    print(f"down: {', '.join(names)}" if names else "down: there was no lab")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="netlab", description="A cluster of hosts with slow links on this machine.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, act: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        found = commands.add_parser(name, help=text, description=text)
        found.set_defaults(act=act)
        return found

    read, positive, nbytes = command.each, command.positive, command.nbytes
    bench = add("bench", _bench, "make a lab, measure collectives across it beside their prediction, take it down")
    bench.add_argument("--hosts", type=read(_hosts), default="2,4,8,16", help="numbers of hosts (default %(default)s)")
    bench.add_argument("--rate", type=read(Speed), default="100mbit", help="rates of the links (default %(default)s)")
    bench.add_argument("--sizes", type=read(_size), default="1m,2m", help="bytes of the buffers (default %(default)s)")
    text = f"which of {', '.join(OPERATIONS)} (default %(default)s)"
    bench.add_argument("--operation", type=command.one_of(*OPERATIONS), default=ALL_REDUCE, metavar="NAME", help=text)
    names = read(command.one_of(*ALGORITHMS, NATIVE))
    bench.add_argument("--algorithms", type=names, help="default: all of the operation but hierarchical")
    bench.add_argument("--repeats", type=positive, default=5, help="times that each is measured (default %(default)s)")
    bench.add_argument(
        "--cut", type=nbytes, default="1g", help="cut messages into pieces of that (default %(default)s)"
    )
    bench.add_argument(
        "--json", type=command.file, metavar="FILE", help="write the result, also what there is of it so far"
    )
    steps = add("steps", _steps, "training steps over the links beside the same command with --simulate")
    steps.add_argument("--hosts", type=read(_hosts), help="only these numbers of hosts (default: all of each case)")
    steps.add_argument("--rate", type=read(Speed), default="100mbit,200mbit", help="default %(default)s")
    names = read(command.one_of(*(case.name for case in CASES)))
    everything = ",".join(case.name for case in CASES)
    steps.add_argument("--cases", type=names, default=everything, help="default %(default)s")
    steps.add_argument("--repeats", type=positive, default=3, help="runs of each (default %(default)s)")
    for each in (steps, bench):
        each.add_argument("--mpi", choices=LIBRARIES, help="refuse to run with another MPI than this")
        each.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="NAME=VALUE",
            help="an MCA parameter, or a variable of MPICH's",
        )
    steps.add_argument("--json", type=command.file, metavar="FILE", help="write the result there")
    make = add("up", _up, "make a lab that stays")
    make.add_argument("--rate", type=command.one(Speed), default="100mbit", help="default %(default)s")
    make.add_argument("--hosts", type=int, default=4, help="default %(default)s")
    run = add("run", _run, "run a command on the lab's head, where mpirun is started")
    run.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND...")
    for each in (make, run, add("down", _down, "take a lab down")):
        each.add_argument("--name", default="lab", help="which lab, if there are several (default %(default)s)")
    return parser


def _hosts(word: str) -> int:
    if not word.isdecimal() or not 2 <= int(word) <= MAX_HOSTS:
        raise UsageError(f"{word!r} is not a number of hosts from 2 to {MAX_HOSTS}; write --hosts 2,4,8")
    return int(word)


def _size(word: str) -> int:
    nbytes = command.nbytes(word)
    if nbytes < 4 or nbytes % 4:
        raise UsageError(f"a buffer of float32 has a multiple of 4 bytes, not {nbytes}")
    return nbytes
