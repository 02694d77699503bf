"""`nnmpi schedule`: draw a pipeline schedule without MPI: grid, bubble, activations.

nnmpi schedule --pipeline 1f1b --stages 4 --microbatches 8
nnmpi schedule --pipeline interleaved --stages 4 --microbatches 8 --virtual-stages 2
nnmpi schedule --pipeline gpipe --stages 2 --microbatches 8 --network alpha_us=50,gbit=10
nnmpi schedule --pipeline zero-bubble --stages 4 --microbatches 8 --costs F=1,B=1.2,W=0.8,SEND=0.1
nnmpi schedule --pipeline 1f1b --stages 4 --microbatches 8 --html 1f1b.html --svg 1f1b.svg
nnmpi schedule --pipeline 1f1b --stages 2 --microbatches 3 --zero 3 --segments 2 --program
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from nnmpi.base.command import MOST, announce, check_numbers, read_command, require, say
from nnmpi.base.custom import load_custom
from nnmpi.base.files import OutputFile
from nnmpi.base.picture import check_figure
from nnmpi.base.units import Bytes, format_bytes, format_seconds, parse_settings
from nnmpi.comm.fit import parse_network
from nnmpi.comm.machine import Machine, blocks
from nnmpi.lab.pages.page import write_page
from nnmpi.lab.render.schedules import compare, describe, picture, programs, render
from nnmpi.schedule.check import check
from nnmpi.schedule.lower import lower, offload, shard_weights, split_stages
from nnmpi.schedule.schedule import Schedule
from nnmpi.schedule.schedules import SCHEDULES, make, named, row_of
from nnmpi.schedule.simulate import Costs, Simulation, even_costs, simulate_schedule

PROGRAM = "nnmpi schedule"


@dataclass(frozen=True)
class ScheduleConfig:
    """The schedule and its costs."""

    pipeline: str
    """Name of the schedule, such as 1f1b or zero-bubble, or FILE.py:NAME."""
    stages: int
    """Pipeline stages, one per rank."""
    microbatches: int
    """Microbatches per step."""
    virtual_stages: int | None = None
    """Stages per rank, of a schedule that leaves them open (default: its usual number)."""
    segments: int = 1
    """Segments of each stage: what ZeRO gathers and sums at once."""
    zero: int = 0
    """The stage of ZeRO, 2 or 3, whose gathers and sums are added."""
    offload: bool = False
    """Move what forward passes save to a store, and back for the backward passes."""
    program: bool = False
    """Print every rank's instructions, in order."""
    costs: str = "F=1,B=1,W=1"
    """Milliseconds of each rank on a microbatch, by the names of papers: F for the forward pass, B
    and W for the halves of the backward pass, of the inputs and of the weights (nnmpi's I and W;
    its B is both), SEND for a message, if not by --network.
    """
    network: str = ""
    """The links, such as alpha_us=50,gbit=10, or the file of a fit (default: messages take no
    time).
    """
    bytes: Bytes = Bytes("1MiB")
    """Bytes of a message between two ranks."""
    html: OutputFile | None = None
    """File for an interactive page."""
    svg: OutputFile | None = None
    """File for a picture for slides: .svg, .png, .pdf."""
    replace: bool = False
    """Replace files that are there."""

    def __post_init__(self) -> None:
        check_numbers(self, "stages microbatches virtual_stages segments", 1, MOST)
        require(
            self.zero in (0, 2, 3),
            f"--zero is {self.zero}; give 2 or 3, whose gathers and sums a schedule has",
        )
        require(
            bool(self.network) or self.bytes == ScheduleConfig.bytes,
            "--bytes is for --network; leave it out",
        )
        _ = self.times
        require(
            not (self.network and "SEND" in self.costs),
            "--network and SEND of --costs are both the time of a message; leave one out",
        )

    @property
    def times(self) -> Mapping[str, float]:
        """The milliseconds by name.

        Raises:
            UsageError: for a name or a number that cannot be used.
        """
        given, names = parse_settings(self.costs), {"F": 1.0, "B": 1.0, "W": 1.0, "SEND": 0.0}
        is_right = given.keys() <= names.keys() and all(0 <= ms < inf for ms in given.values())
        require(
            bool(given) and is_right,
            f"--costs {self.costs!r} is not understood; give numbers of milliseconds for some of"
            f" {', '.join(names)}, such as F=1,B=1.2,W=0.8,SEND=0.1: B and W are the halves of a"
            " backward pass, of the inputs and of the weights",
        )
        return names | given


def main(words: Sequence[str]) -> str:
    """Return the schedule's picture and figures, and write the requested files.

    Raises:
        UsageError: for wrong options, or a file that cannot be written.
    """
    (options,) = read_command("", PROGRAM, __doc__ or "", (ScheduleConfig,), words)
    name = named(load_custom(options.pipeline, "--pipeline", "(rank, ranks, microbatches)"))
    check_figure(options.svg)
    virtual = options.virtual_stages or row_of(name).stages
    stages, microbatches = options.stages, options.microbatches
    work = f"a schedule of {stages} x {virtual} stages and {microbatches} microbatches"
    announce(work, 2.5e-4 * stages * virtual * microbatches)
    schedule = _with_memory(options, make(name, stages, microbatches, virtual))
    check(schedule)
    costs = _costs(options, schedule)
    result = _simulate(options, schedule)
    lines = [
        describe(schedule),
        "",
        render(schedule, costs, result),
        "",
        *_figures(schedule, result, options),
    ]
    if options.program:
        lines += ["", *programs(schedule)]
    if options.svg:
        about = _modelled(options, schedule.trains)
        if options.network:
            about += f", by {options.network} and {format_bytes(options.bytes)}"
        picture(schedule, result, about).save(options.svg)
    if options.html:
        beside = {item: (item, row.stages) for item, row in SCHEDULES.items()}
        animations = compare(
            beside | {schedule.name: (name, virtual)},
            schedule.name,
            stages,
            microbatches,
            partial(_simulate, options),
            change=partial(_with_memory, options),
        )
        write_page(options.html, "schedule", f"pipeline schedule {schedule.name}", animations)
        lines.append(f"open {options.html} in a browser")
    return "\n".join(lines)


def _with_memory(options: ScheduleConfig, schedule: Schedule) -> Schedule:
    """Return the executable schedule, with what the options add for the sake of memory."""
    schedule = lower(split_stages(schedule, [options.segments] * schedule.stages))
    if options.zero > 1:
        schedule = shard_weights(schedule, gathers=options.zero > 2)
    for rank in range(schedule.ranks * options.offload):
        schedule = offload(schedule, rank, schedule.stages_of(rank))
    return schedule


def _costs(options: ScheduleConfig, schedule: Schedule) -> Costs:
    """Return the costs by the options; the times of a rank's stages add up to the given ones."""
    forward_s, inputs_s, weights_s, _ = (
        1e-3 * ms / schedule.virtual for ms in options.times.values()
    )
    return even_costs(schedule.stages, forward_s, (inputs_s, weights_s), _message(options))


def _simulate(options: ScheduleConfig, schedule: Schedule) -> Simulation:
    """Return a schedule's times; the messages of all ranks share the links of --network."""
    costs, machine = _costs(options, schedule), _machine(options)
    if machine is not None and machine.nodes:  # a page has other numbers of ranks, too
        per_node = machine.nodes.count(machine.nodes[0])
        machine = replace(machine, nodes=blocks(schedule.ranks, per_node))
    return simulate_schedule(schedule, costs, machine, lambda _: (options.bytes,))


def _machine(options: ScheduleConfig) -> Machine | None:
    ranks = options.stages  # on one node unless it says otherwise, as for `nnmpi comm`
    return parse_network(options.network, ranks, ranks) if options.network else None


def _message(options: ScheduleConfig) -> float:
    machine = _machine(options)
    return (
        1e-3 * options.times["SEND"]
        if machine is None
        else machine.link(machine.nodes is not None).one_way(options.bytes)
    )


def _modelled(options: ScheduleConfig, trains: bool) -> str:
    """Return the costs that the options give, as text."""
    ms, message_s = options.times, _message(options)
    halves = f", {ms['B']:g} + {ms['W']:g}" if ms["B"] != ms["W"] else ""
    times = [f"forward {ms['F']:g} ms"]
    if trains:
        times.append(f"backward {ms['B'] + ms['W']:g} ms{halves}")
    if message_s > 0:
        times.append(f"message {format_seconds(message_s)}")
    return f"modelled; of each rank: {', '.join(times)}"


def _figures(schedule: Schedule, simulation: Simulation, options: ScheduleConfig) -> list[str]:
    """Return the figures, one per line."""
    full = " ".join(f"{saved / schedule.virtual:g}" for saved in simulation.peak_activations)
    item = "of each rank: stages x microbatches" + (
        f"; in whole ranks' layers: {full}" if schedule.virtual > 1 else ""
    )
    about = _modelled(options, schedule.trains)
    return [
        f"makespan          {1e3 * simulation.makespan_s:g} ms   ({about})",
        f"bubble            {100 * simulation.bubble:.1f} %   of all ranks' time",
        f"peak activations  {' '.join(map(str, simulation.peak_activations))}   ({item})",
        f"messages          {simulation.messages}",
    ]


if __name__ == "__main__":
    sys.exit(say(main))
