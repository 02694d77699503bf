"""GOAL: what is written and read back costs what nnmpi's own simulation says; bad texts."""

import re
from copy import copy
from dataclasses import replace
from functools import partial

import pytest

from nnmpi.base.errors import NnmpiError
from nnmpi.comm.algorithms.registry import COLLECTIVES
from nnmpi.comm.duration import price
from nnmpi.comm.machine import Machine
from nnmpi.lab import goal
from nnmpi.lab.comm import main
from nnmpi.lab.goal import GoalProgram, GoalText, makespan
from nnmpi.lab.schedule import main as schedule
from nnmpi.schedule.lower import lower
from nnmpi.schedule.schedules import SCHEDULES, make, usual_stages
from nnmpi.schedule.simulate import even_costs, simulate_schedule
from tests.harness.refusals import refuses
from tests.lab.test_msccl import PROGRAMS, read
from tests.lab.test_planner import layouts, pricer

MACHINE = Machine.uniform(1e-5, 1e-9, 2e-10)


def seconds(text, machine=MACHINE):
    return makespan(GoalProgram("own", str(text)).simulate(machine))


@pytest.mark.parametrize("key", [*COLLECTIVES, *PROGRAMS])
def test_collectives_cost_what_they_cost(key, tmp_path):
    collective = read(PROGRAMS[key], tmp_path) if key in PROGRAMS else COLLECTIVES[key]
    for size in (collective.ranks,) if collective.ranks else range(2, 10):
        for nbytes in (1001, 65_539, 1_000_003):
            text = GoalText(size)
            text.collective(collective, range(size), nbytes, MACHINE.add)
            expected = price(collective, size, nbytes, MACHINE)
            assert seconds(text) == pytest.approx(expected, rel=2e-3), (size, nbytes)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_take_what_they_take(name):
    for ranks, batches, nbytes in ((2, 3, 1001), (3, 7, 10**6), (4, 4, 10**6), (9, 2, 10**5)):
        lowered = lower(make(name, ranks, batches, usual_stages(name)))
        costs, text = even_costs(lowered.stages, 1e-3, (1.2e-3, 8e-4)), GoalText(ranks)
        given = lowered, costs, partial(lambda two, _: two, (nbytes, 3))
        text.schedule(*given, range(ranks))
        result = simulate_schedule(*given[:2], replace(MACHINE, nodes=(0,) * ranks), given[2])
        assert seconds(text) == pytest.approx(result.makespan_s)


def test_steps_take_what_layouts_are_priced_at():
    """Where links are equal. A bucket's sum is as long as the backward pass that hides it."""
    for ranks, per_node in ((4, 4), (4, 1), (3, 1)):
        one = pricer(ranks, per_node)
        for item in layouts(one)[::7]:
            found = seconds(one.step(item), one.network.machine)
            assert found == pytest.approx(one.price(item).seconds, rel=0.01), item


def test_buckets_are_summed_beside_computing(monkeypatch):
    """Each waits for its part of the backward pass, and hides behind the next one."""
    monkeypatch.setattr("nnmpi.lab.planner.price.BUCKET_BYTES", 10_000)
    one = copy(pricer(4, 1))
    one.network = replace(one.network, machine=replace(Machine.uniform(1e-9, 2e-9), nodes=range(4)))
    item = layouts(one)[0]
    price, exchanges = one.price(item), one._seconds([*one._sums(item), *one._agreements(item)])
    assert item.dp == 4 and price.exposed_s < 0.6 * exchanges
    assert seconds(one.step(item), one.network.machine) == pytest.approx(price.seconds, rel=0.01)


RANK = "num_ranks 1\nrank 0 {{\n{}\n}}"
PAIR = "num_ranks 2\nrank 0 {{\n{}\n}}\nrank 1 {{\n{}\n}}"


@pytest.mark.parametrize(
    "text, ns",
    [
        (RANK.format("calc 5\nb: calc 3 cpu 0 nic 1"), 8),
        (RANK.format("calc 5 // cpu 1\n/* calc\n9 */b:calc 3 cpu 1"), 5),
        (RANK.format("a: calc 5\nb: calc 3 cpu 1\nb requires a"), 8),
        (RANK.format("a: calc 5\nc: calc 1\nb: calc 3 cpu 1\nb irequires c"), 8),
        (RANK.format(""), 0),
        # a short message leaves before it is awaited, a long one does not
        (PAIR.format("send 8b to 1", "a: calc 900000\nr: recv 9b from 0\nr requires a"), 900_000),
        (
            PAIR.format(
                "send 8000b to 1 tag 2", "a: calc 9\nr: recv 8000b from 0 tag 2\nr requires a"
            ),
            18_009,
        ),
    ],
)  # fmt: skip
def test_texts_of_others(text, ns):
    assert round(1e9 * seconds(text)) == ns


BAD = {
    "": "line 1: '' is the end, after 0 of 0 ranks",
    "num_ranks 0": "after 0 of 0 ranks",
    "rank 0 {\n}": "line 1: 'rank 0 {' is not the next rank, below num_ranks",
    "num_ranks 2\nnum_ranks 2": "line 2: 'num_ranks 2' is not the first line",
    "num_ranks 2\nrank 0 {\n}": "line 3: '}' is the end, after 1 of 2 ranks",
    "num_ranks 1\nrank 0 {": "is the end, after 0 of 1 ranks",
    "num_ranks 2\nrank 0 {\nrank 1 {": "line 3: 'rank 1 {' is not the next",
    "num_ranks 1\nrank 1 {": "is not the next",
    "num_ranks 1\n}": "ends no rank",
    "num_ranks 1\ncalc 1": "is outside of a rank",
    "num_ranks 99999999999": "is no line of GOAL",
    "\x7fELF\0\0": "line 1: .* is no line of GOAL",
    "<!DOCTYPE a [<!ENTITY b 'c'>]>": "is no line of GOAL",
    RANK.format("calc 5")[:-2]: "is the end",
    RANK.format("a: calc 1\na: calc 1"): "line 4: 'a: calc 1' .* has the label of another",
    RANK.format("a: calc 1\na requires b"): "names a label that is not above it",
    RANK.format("a: calc 1\na requires a"): "deadlock, a circle of waits: line 3",
    RANK.format("calc -5"): "'calc -5' is no line of GOAL",
    RANK.format(f"calc {'9' * 5000}"): "is no line of GOAL",
    RANK.format("jump 5"): "is no line of GOAL",
    RANK.format("send 1b to 0"): "a message not another rank",
    RANK.format("send 5"): "is no line of GOAL",
    PAIR.format("send 1b to 2", ""): "a message not another rank",
    PAIR.format("send 1b from 1", ""): "is no line of GOAL",
    PAIR.format("recv 1b from 1", "send 1b to 0 tag 1"): "has no other end in rank",
    PAIR.format("recv 1b from 1", "send 2b to 0"): "line 3: .* is shorter than its message",
    PAIR.format("send 1b to 1\nsend 1b to 1", "recv 1b from 0"): "line 4: .* has no other end",
    PAIR.format(
        "a: recv 1b from 1\nb: send 1b to 1\nb requires a",
        "a: recv 1b from 0\nb: send 1b to 0\nb requires a",
    ): "deadlock, a circle of waits: (line [3489]: '[^']*'(; )?){4}$",
    "\n" * (goal.MOST_LINES + 1): "no GOAL .it has more than 1000000 lines",
}


@pytest.mark.parametrize("text", BAD, ids=range(len(BAD)))
def test_a_bad_text_is_one_sentence(text, tmp_path):
    file = tmp_path / "own.goal"
    file.write_text(text)
    refuses(
        NnmpiError,
        f"^{re.escape(str(file))}[,:] [^\n]*{BAD[text]}[^\n]*$",
        main,
        ["simulate", str(file)],
    )


def test_the_commands(tmp_path):
    file, links = tmp_path / "own.goal", ["--network", "alpha=1e-5,beta=1e-9,gamma=2e-10"]
    words = ["ring", "--ranks", "4", "--bytes", "1000003", *links]
    main(["export", *words, "--format", "goal", "--out", str(file)])
    found = main(["simulate", str(file), *links])
    assert found.startswith(f"{file}, 4 ranks: 1.71 ms") and "1.71 ms" in main(["simulate", *words])
    assert "rank 3  to 0###" in main(["render", str(file), *links])
    for given in (["prove", str(file)], ["render", str(file), "--html", "x.html"]):
        refuses(NnmpiError, "has bytes and no chunks", main, given)
    refuses(NnmpiError, "is for 4 ranks, not for 3", main, ["simulate", str(file), "--ranks", "3"])
    told = schedule(f"--pipeline 1f1b --stages 3 --microbatches 4 --goal {file}".split())
    assert "makespan          18 ms" in told
    assert "3 ranks: 18 ms" in main(["simulate", str(file), "--network", "alpha=0"])
    assert "s2B3###" in main(["render", str(file), "--network", "alpha=0"])
