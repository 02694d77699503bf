"""The schedules: functions from a rank to its computation, in order; `lower` adds the rest.

S is the number of stages, M the number of microbatches; costs hold for stages and microbatches of
equal cost. `nnmpi schedule` draws the pictures. To add a schedule, write its generator
here and its row in `SCHEDULES`: the options, their help, the planner and the tests read the row.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, zip_longest
from typing import Annotated, Any, TypeAlias

from nnmpi.base.custom import call_user, name_of
from nnmpi.base.errors import ScheduleError, UsageError, check_int
from nnmpi.base.glossary import Glossary
from nnmpi.base.shard import split
from nnmpi.schedule.schedule import (
    Home,
    Instruction,
    Instructions,
    Kind,
    Schedule,
    around,
    stages_of,
    there_and_back,
)
from nnmpi.schedule.there_and_back import fastest


def naive(rank: int, ranks: int, microbatches: int) -> Instructions:
    """Naive pipeline: one microbatch at a time, forward and back, all ranks but one idle.

        nnmpi schedule --pipeline naive --stages 3 --microbatches 2

        time    0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17
        rank 0  F0 .  .  .  .  .  .  B0--- F1 .  .  .  .  .  .  B1---|
        rank 1  .  F0 .  .  .  B0--- .  .  .  F1 .  .  .  B1---|.  .
        rank 2  .  .  F0 B0--- .  .  .  .  .  .  F1 B1---|.  .  .  .

    Bubble (S-1)/S, for any number of microbatches; one activation is saved per stage.
    """
    return tuple(kind.at(rank, m) for m in range(microbatches) for kind in (Kind.F, Kind.B))


def gpipe(rank: int, ranks: int, microbatches: int) -> Instructions:
    """GPipe: all forward passes fill the pipeline, then all backward passes drain it.

        nnmpi schedule --pipeline gpipe --stages 4 --microbatches 6

        time    0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26
        rank 0  F0 F1 F2 F3 F4 F5 .  .  .  .  .  .  .  .  .  B5--- B4--- B3--- B2--- B1--- B0---|
        rank 1  .  F0 F1 F2 F3 F4 F5 .  .  .  .  .  .  B5--- B4--- B3--- B2--- B1--- B0---|.  .
        rank 2  .  .  F0 F1 F2 F3 F4 F5 .  .  .  B5--- B4--- B3--- B2--- B1--- B0---|.  .  .  .
        rank 3  .  .  .  F0 F1 F2 F3 F4 F5 B5--- B4--- B3--- B2--- B1--- B0---|.  .  .  .  .  .

    The bubble is (S-1)/(M+S-1); every stage saves M activations. Source: Huang et al., GPipe:
    Efficient Training of Giant Neural Networks using Pipeline Parallelism, 2019.
    """
    forwards = tuple(Kind.F.at(rank, m) for m in range(microbatches))
    return forwards + tuple(Kind.B.at(rank, m) for m in reversed(range(microbatches)))


def inference(
    rank: int, ranks: int, microbatches: int, virtual: int = 1, home: Home = around
) -> Instructions:
    """Inference: forwards only, one microbatch after the other.

        nnmpi schedule --pipeline inference --stages 4 --microbatches 6

        time    0  1  2  3  4  5  6  7  8
        rank 0  F0 F1 F2 F3 F4 F5 .  .  .
        rank 1  .  F0 F1 F2 F3 F4 F5 .  .
        rank 2  .  .  F0 F1 F2 F3 F4 F5 .
        rank 3  .  .  .  F0 F1 F2 F3 F4 F5

    Bubble (S-1)/(M+S-1); one activation is saved per stage. With several stages on each of R ranks,
    microbatches go in rounds of R or a few more: a rank runs a round through its first stage, then
    through its second, and so on.
    """
    stages = stages_of(rank, ranks, ranks * virtual, home)
    rounds = split(microbatches, max(1, microbatches // ranks))
    return tuple(Kind.F.at(stage, m) for round_ in rounds for stage in stages for m in round_)


def one_f_one_b(rank: int, ranks: int, microbatches: int) -> Instructions:
    """1F1B: each backward pass as early as possible, alternating with forward passes.

        nnmpi schedule --pipeline 1f1b --stages 4 --microbatches 6

        time    0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26
        rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B0--- F4 B1--- F5 B2--- .  B3--- .  B4--- .  B5---|
        rank 1  .  F0 F1 F2 .  .  .  .  B0--- F3 B1--- F4 B2--- F5 B3--- .  B4--- .  B5---|.  .
        rank 2  .  .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- F4 B3--- F5 B4--- .  B5---|.  .  .  .
        rank 3  .  .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- F5 B5---|.  .  .  .  .  .

    The bubble is GPipe's, (S-1)/(M+S-1), but stage s saves only min(S-s, M) activations. Source:
    Narayanan et al., PipeDream: Generalized Pipeline Parallelism for DNN Training, 2019; with a
    flush at the end of each step: Narayanan et al., Memory-Efficient Pipeline-Parallel DNN
    Training, 2021.
    """
    forwards, backwards = (
        [kind.at(rank, m) for m in range(microbatches)] for kind in (Kind.F, Kind.B)
    )
    return _in_turns(forwards, backwards, ranks - 1 - rank)


def _in_turns(
    forwards: Sequence[Instruction], backwards: Sequence[Instruction], warm_up: int
) -> Instructions:
    turns = zip_longest(forwards[warm_up:], backwards)
    return (*forwards[:warm_up], *(item for turn in turns for item in turn if item is not None))


def pipedream(rank: int, ranks: int, microbatches: int) -> Instructions:
    """PipeDream: 1F1B without a flush; every stage updates after each backward pass.

        nnmpi schedule --pipeline pipedream --stages 4 --microbatches 6

        time    0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26
        rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B0---|F4 B1---|F5 B2---|.  B3---|.  B4---|.  B5---|
        rank 1  .  F0 F1 F2 .  .  .  .  B0---|F3 B1---|F4 B2---|F5 B3---|.  B4---|.  B5---|.  .
        rank 2  .  .  F0 F1 .  .  B0---|F2 B1---|F3 B2---|F4 B3---|F5 B4---|.  B5---|.  .  .  .
        rank 3  .  .  .  F0 B0---|F1 B1---|F2 B2---|F3 B3---|F4 B4---|F5 B5---|.  .  .  .  .  .

    A | is an update. Between the forward and the backward of a microbatch stage s updates its
    weights S-1-s times (fewer at the beginning): its staleness. The backward uses the weights of
    the forward, so a stage keeps up to S-s versions of them (weight stashing). With many
    microbatches the only bubbles are at the beginning and the end. Source: Narayanan et al.,
    PipeDream: Generalized Pipeline Parallelism for DNN Training, 2019.
    """
    program: list[Instruction] = []
    for item in one_f_one_b(rank, ranks, microbatches):
        program.append(item)
        if item.kind is Kind.B:
            program.append(Kind.STEP.at(rank, item.microbatch))
    return tuple(program)


def interleaved(rank: int, ranks: int, microbatches: int, virtual: int) -> Instructions:
    """Interleaved 1F1B: several thin stages per rank, so filling and draining take less.

    With R ranks and V virtual stages on each, microbatches go in rounds of R, or a few more: the
    remainder is distributed over the rounds, so any M >= R works. In a round a rank does its first
    stage for all microbatches, then its second, and so on; the backward passes start with its last
    stage.

        nnmpi schedule --pipeline interleaved --stages 2 --microbatches 3

        time    0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15  16  17  18  19  20
        rank 0  0F0 0F1 0F2 2F0 2F1 2F2 .   2B0---- .   2B1---- .   2B2----+0B0---- 0B1---- 0B2----|
        rank 1  .   1F0 1F1 1F2 3F0 3B0---- 3F1 3B1---- 3F2 3B2----+1B0---- 1B1---- 1B2----|.   .

    With M >= R microbatches the bubble is (R-1)/(V M + R-1), V times less than 1F1B's, for V times
    the messages and for more activations: rank r warms up with 2 (R-1-r) + (V-1) k forwards, k
    microbatches in the first round. Source: Narayanan et al., Efficient Large-Scale Language Model
    Training on GPU Clusters Using Megatron-LM, 2021.
    """
    if virtual == 1:
        return one_f_one_b(rank, ranks, microbatches)
    stages = range(rank, ranks * virtual, ranks)
    rounds = split(microbatches, max(1, microbatches // ranks))
    forwards = inference(rank, ranks, microbatches, virtual)
    backwards = [
        Kind.B.at(stage, m) for round_ in rounds for stage in reversed(stages) for m in round_
    ]
    return _in_turns(forwards, backwards, 2 * (ranks - 1 - rank) + (virtual - 1) * len(rounds[0]))


def zero_bubble(rank: int, ranks: int, microbatches: int) -> Instructions:
    """Zero bubble (ZB-H1): the deferrable half of split backward passes fills the bubble.

    I gives the gradient of the input, for which the previous stage waits; W gives the gradients of
    the weights, for which no stage waits. Stage s runs as in 1F1B, and is s microbatches behind
    with W: it catches up while other stages drain.

        nnmpi schedule --pipeline zero-bubble --stages 4 --microbatches 6

        time    0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17 18 19 20
        rank 0  F0 F1 F2 F3 .  .  .  I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5|
        rank 1  .  F0 F1 F2 .  .  I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5|
        rank 2  .  .  F0 F1 .  I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5|
        rank 3  .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5|

    With F, I and W equally long and M >= S the bubble is (S-1)/(3M+S-1): a third of 1F1B's. Every
    stage saves min(S, M) activations (until their W), as many as the first stage of 1F1B does.
    Source: Qi et al., Zero Bubble Pipeline Parallelism, 2024.
    """
    return tuple(fastest(ranks, microbatches, ranks, 1)[rank])


def zb_v(rank: int, ranks: int, microbatches: int) -> Instructions:
    """ZB-V: stages in V order; busy throughout with 1F1B's activations.

        nnmpi schedule --pipeline zb-v --stages 3 --microbatches 3

        time    0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15  16  17  18  19
        rank 0  0F0 0F1 0F2 .   .   5F0 5I0 5F1 5I1 5F2 5I2 0I0 5W0 0I1 5W1 0I2 5W2+0W0 0W1 0W2|
        rank 1  .   1F0 1F1 .   4F0 1F2 4F1 4I0 4F2 4I1 1I0 4I2 1I1 4W0 1I2 4W1 1W0 4W2+1W1 1W2|
        rank 2  .   .   2F0 3F0 2F1 3F1 2F2 3F2 3I0 2I0 3I1 2I1 3I2 2I2 3W0 2W0 3W1 2W1 3W2+2W2|

    With M >= R microbatches on R ranks, and F, I and W equally long, each rank idles for R - 1
    forwards of a stage in all, the time that the first microbatch takes to the last rank. This is a
    sixth of 1F1B's bubble. A rank saves 2 R activations of half its layers (until their W); the
    first rank of 1F1B saves R activations of all its layers. Source: Qi et al., Pipeline
    Parallelism with Controllable Memory, 2024. `there_and_back` computes ZB-V, V-Half and V-Min.
    """
    return tuple(fastest(ranks, microbatches, 2 * ranks)[rank])


def v_half(rank: int, ranks: int, microbatches: int) -> Instructions:
    """V-Half: as ZB-V, with half of 1F1B's activations, and with M >= R at most half of its bubble.

    nnmpi schedule --pipeline v-half --stages 3 --microbatches 3

    time    0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15  16  17  18  19  20  21
    rank 0  0F0 0F1 .   .   .   5F0 5I0 0F2 5W0 .   5F1 5I1 0I0 5W1 5F2 5I2 0I1 0W0 5W2+0W1 0I2 0W2|
    rank 1  .   1F0 1F1 .   4F0 .   .   4I0 1F2 4F1 1I0 4W0 4I1 4F2 1W0 1I1 4I2 4W1 1W1 1I2 4W2+1W2|
    rank 2  .   .   2F0 3F0 2F1 3F1 .   .   3I0 2I0 2F2 3W0 3F2 3I1 2I1 2W0 3W1 3I2 2I2 2W1 3W2+2W2|

    A rank saves R + 2 activations of half its layers.
    """
    return tuple(fastest(ranks, microbatches, min(ranks + 2, 2 * ranks))[rank])


def v_min(rank: int, ranks: int, microbatches: int) -> Instructions:
    """V-Min: as ZB-V, with a third of 1F1B's activations, and at most two thirds of its bubble.

        nnmpi schedule --pipeline v-min --stages 3 --microbatches 2

        time    0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15
        rank 0  0F0 0F1 .   .   .   5F0 5I0 5F1 5I1 5W0 5W1+0I0 0W0 0I1 0W1|.
        rank 1  .   1F0 1F1 .   4F0 .   4F1 4I0 4W0 4I1 1I0 4W1+1I1 1W0 1W1|.
        rank 2  .   .   2F0 3F0 2F1 3F1 .   .   3I0 2I0 3I1 2I1 3W0 2W0 3W1+2W1|

    With two microbatches V-Half is the same; with three it idles less. A rank saves 2 (R + 4) / 3
    activations of half its layers, with (R + 4) / 3 rounded down.
    """
    return tuple(fastest(ranks, microbatches, 2 * ((ranks + 4) // 3))[rank])


@dataclass(frozen=True)
class NamedSchedule:
    """What the name of a schedule stands for; all that lists or compares schedules reads these.

    Attributes:
        rule: (rank, ranks, microbatches) -> the rank's computation. The stages per rank follow with
            `any_stages`, and the map from stages to ranks where `home` is None.
        help: what it is, in a few words, for the help of options.
        stages: how many a rank has, by default if others are possible.
        any_stages: whether a rank may have any number of stages.
        home: the map from stages to ranks; None for the caller's.
        trains: whether there are backward passes.
        planned: the numbers of stages per rank with which the planner tries it; None for `stages`.
    """

    rule: Callable[..., Sequence[Instruction]]
    help: str = ""
    stages: int = 1
    any_stages: bool = False
    home: Home | None = around
    trains: bool = True
    planned: tuple[int, ...] | None = None

    @property
    def tried(self) -> tuple[int, ...]:
        """The numbers of stages per rank with which the planner tries it."""
        return (self.stages,) if self.planned is None else self.planned


def _turning(rule: Callable[..., Instructions], words: str) -> NamedSchedule:
    """Return a row of two stages on a rank, there and back."""
    return NamedSchedule(rule, f"two stages per rank in V order, {words}", 2, home=there_and_back)


INFERENCE = "inference"  # of evaluations

SCHEDULES: Mapping[str, NamedSchedule] = {
    # the planner leaves it out: its stages run one after another, so it is never faster than GPipe
    "naive": NamedSchedule(naive, "one microbatch at a time", planned=()),
    "gpipe": NamedSchedule(gpipe, "all forward passes, then all backward passes"),
    "1f1b": NamedSchedule(
        one_f_one_b, "each backward pass as early as possible, with fewer activations than gpipe"
    ),
    "interleaved": NamedSchedule(
        interleaved, "1f1b with several stages per rank", 2, any_stages=True, planned=(2, 4)
    ),
    "zero-bubble": NamedSchedule(zero_bubble, "the second half of backward passes fills gaps"),
    "zb-v": _turning(zb_v, "the smallest bubble"),
    "v-half": _turning(v_half, "half of the activations"),
    "v-min": _turning(v_min, "a third of the activations"),
    INFERENCE: NamedSchedule(
        inference, "forward passes only", any_stages=True, home=None, trains=False, planned=()
    ),
    # the planner leaves it out: it gives other results than one rank
    "pipedream": NamedSchedule(
        pipedream, "updates after every microbatch, with stale weights", planned=()
    ),
}
"""The schedules by name."""

TRAINING = tuple(name for name, row in SCHEDULES.items() if row.trains)
PipelineName: TypeAlias = Annotated[
    str, TRAINING, Glossary({name: SCHEDULES[name].help for name in TRAINING})
]

Generator: TypeAlias = str | Callable[[int, int, int], Sequence[Instruction]]
"""A name, or a user's function (rank, ranks, microbatches) -> the rank's computation."""


def named(schedule: Generator) -> Generator:
    """Return the name of one of this package's functions; any other schedule as it is."""
    names = [name for name, row in SCHEDULES.items() if row.rule is schedule]
    return names[0] if names else schedule


def row_of(schedule: Generator) -> NamedSchedule:
    """Return the row of a name; of a user's function one without particulars.

    Raises:
        UsageError: for an unknown name.
    """
    schedule = named(schedule)
    if not isinstance(schedule, str):
        return NamedSchedule(schedule)
    if schedule not in SCHEDULES:
        raise UsageError(f"there is no schedule {schedule!r}; choose one of {', '.join(SCHEDULES)}")
    return SCHEDULES[schedule]


def in_words(stages: int) -> str:
    """Return a number of stages as text."""
    return {1: "one stage", 2: "two stages"}.get(stages, f"{stages} stages")


def with_any_stages() -> str:
    """Return the names of the schedules to train with of which a rank may have several stages."""
    return " or ".join(name for name in TRAINING if SCHEDULES[name].any_stages)


@cache
def example_of(name: str) -> Schedule:
    """Return a schedule by name for two ranks, which shows what its instructions do."""
    return make(name, ranks=2, microbatches=4)


def make(
    name: Generator,
    ranks: int,
    microbatches: int,
    virtual: int | None = None,
    home: Home | None = None,
) -> Schedule:
    """Return a schedule, computation only; `lower` adds the rest.

    Args:
        name: one of `SCHEDULES`, or a function of your own. Its instructions say how many stages a
            rank has, and whether they go around or there and back.
        ranks: number of ranks.
        microbatches: number of microbatches in a step.
        virtual: stages per rank, for names; None for the row's.
        home: the rank of each stage, for a row that leaves it open, as that of "inference" does.

    Raises:
        UsageError: for an unknown name, or numbers that the schedule does not support.

    Example:
        >>> schedule = make("1f1b", ranks=2, microbatches=2)
        >>> [" ".join(map(str, program)) for program in schedule.programs]
        ['0F0 0F1 0B0 0B1', '1F0 1B0 1F1 1B1']
    """
    name, row = named(name), row_of(name)
    virtual = row.stages if virtual is None else virtual
    for noun, number in (
        ("ranks", ranks),
        ("microbatches", microbatches),
        ("virtual stages per rank", virtual),
    ):
        check_int(f"a schedule's number of {noun}", number)
    if isinstance(name, str) and not row.any_stages and virtual != row.stages:
        raise UsageError(
            f"{name} has {in_words(row.stages)} on each rank, not {virtual}; for several choose"
            f" {with_any_stages()}"
        )
    home = home or row.home or around
    more: list[Any] = []
    if row.any_stages:
        more.append(virtual)
    if row.home is None:
        more.append(home)
    programs = tuple(
        call_user(row.rule, Instruction, rank, ranks, microbatches, *more) for rank in range(ranks)
    )
    if callable(name):
        virtual, home = _stages(programs)
        valid = (range(ranks * virtual), {None, *range(microbatches)})
        for item in chain.from_iterable(programs):
            numbers = zip((item.stage, item.microbatch), valid, strict=True)
            if type(item.kind) is not Kind or any(
                type(x) is float or x not in values for x, values in numbers
            ):
                raise ScheduleError(
                    f"{name_of(name)}: {item} does not belong in {ranks} stages and {microbatches}"
                    " microbatches"
                )
    return Schedule(name_of(name), ranks, ranks * virtual, microbatches, programs, home)


def _stages(programs: Sequence[Instructions]) -> tuple[int, Home]:
    """Return the stages per rank of a user's programs, and their map to ranks.

    If they are no known map's, return one per rank, and `check` names the fault.
    """
    ranks = len(programs)
    found = {(item.stage, rank) for rank in range(ranks) for item in programs[rank]}
    for virtual in range(2, len(found) // ranks + 1):
        for home in (around, there_and_back):
            if found == {(stage, home(stage, ranks)) for stage in range(ranks * virtual)}:
                return virtual, home
    return 1, around
