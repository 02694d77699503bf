"""The command: what it says, the files that it writes, and one sentence for each mistake."""

import pytest

from nnmpi.base.errors import UsageError
from nnmpi.lab.render.schedules import animation
from nnmpi.lab.schedule import main
from nnmpi.schedule.lower import lower, shard_weights, split_stages
from nnmpi.schedule.schedules import SCHEDULES, make
from nnmpi.schedule.simulate import even_costs, simulate_schedule

COMMAND = "--pipeline 1f1b --stages 4 --microbatches 8"


def test_grid_and_figures():
    title, _, *rest = main(COMMAND.split()).splitlines()
    assert title == "1f1b: 4 ranks, 8 microbatches"
    assert rest[1].startswith("rank 0  F0 F1 F2 F3 ")
    assert (
        rest[7]
        == "A column is the time of one forward of a stage; a backward takes 2, a message none."
    )
    assert rest[9:] == [
        "makespan          33 ms   (modelled; of each rank: forward 1 ms, backward 2 ms)",
        "bubble            27.3 %   of all ranks' time",
        "peak activations  4 3 2 1   (of each rank: stages x microbatches)",
        "messages          48",
    ]


def test_what_thin_stages_keep_is_told_in_whole_ranks():
    text = main(["--pipeline", "interleaved", *COMMAND.split()[2:]])
    assert (
        "11 9 7 5   (of each rank: stages x microbatches; in whole ranks' layers: 5.5 4.5 3.5 2.5)"
        in text
    )


def test_what_zero_and_offloading_add_is_printed_and_drawn():
    words = "--pipeline gpipe --stages 2 --microbatches 2 --zero 3 --segments 2 --program"
    *_, first, second = main(words.split()).splitlines()
    assert first.startswith("rank 0  0GATHER0 1GATHER0 0F0 0FREE0 0GATHER1 1F0 1SEND_ACT0 1FREE0 ")
    assert second.endswith("2B0 2REDUCE0 2FREE0 2SEND_GRAD0 2STEP 3STEP")
    schedule = shard_weights(lower(split_stages(make("gpipe", 1, 1), [2])), gathers=True)
    held = animation(schedule, simulate_schedule(schedule, even_costs(2, 1e-3)))["held"]
    # the first segment is gathered again while the second one's backward runs
    assert sorted(row[2:] for row in held) == [[0, 0, 0, 1], [0, 0, 2, 6], [1, 0, 0, 4]]
    words = "--pipeline gpipe --stages 1 --microbatches 4 --offload --program"
    *_, program = main(words.split()).splitlines()
    assert "0F1 0DROP0 0OUT1" in program
    assert "0IN0 0B1 0B0" in program


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_can_be_looked_at(name):
    assert f"{name}: 1 rank" in main(f"--pipeline {name} --stages 1 --microbatches 1".split())
    assert "bubble" in main(f"--pipeline {name} --stages 3 --microbatches 11".split())


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_grid_takes_the_makespan(name):
    links = ["--network", "alpha_us=10,gbit=1"]
    words = f"--pipeline {name} --stages 3 --microbatches 6 --bytes 128KiB"
    told = main([*words.split(), *links])
    ms = float(told.partition("makespan ")[2].split()[0])
    columns = 1 + int(told.splitlines()[2].split()[-1])
    assert columns / SCHEDULES[name].stages == pytest.approx(ms, abs=4)


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("", "required: --pipeline, --stages, --microbatches"),
        (
            "--pipeline 1b1f --stages 2 --microbatches 2",
            "there is no schedule '1b1f'; choose one of naive, gpipe",
        ),
        (
            "--pipeline gpipe --stages 0 --microbatches 2",
            "--stages is 0; give a whole number, 1 or more",
        ),
        (
            "--pipeline gpipe --stages 2 --microbatches x",
            "--microbatches is x; it must be a whole number",
        ),
        (
            "--pipeline gpipe --stages 2 --microbatches 2 --virtual-stages 2",
            "gpipe has one stage on each rank, not 2",
        ),
        (
            "--pipeline gpipe --stages 5000 --microbatches 5000",
            "5000 microbatches would take 1 h 44 min or so",
        ),
        (f"{COMMAND} --virtual-stages {10**20}", "give a whole number, 1 or more, and below 1e.12"),
        ("--schedule gpipe --stages 2", "--schedule is not an option; did you mean --pipeline?"),
        (f"{COMMAND} --zero 1", "--zero is 1; give 2 or 3"),
        (f"{COMMAND} --bytes 4", "--bytes is for --network; leave it out"),
        (f"{COMMAND} --message-ms 1", "--message-ms is not an option; did you mean --network?"),
        *(
            (
                f"{COMMAND} --costs {text}",
                f"--costs '{text}' is not understood; .* F, B, W, SEND, such",
            )
            for text in ("F=-1", "F=inf", "I=1", "F=1,F=2", "F", "B=x")
        ),
        (
            f"{COMMAND} --costs F=1,SEND=1 --network gbit=1",
            "--network and SEND of --costs are both the time of a message",
        ),
        (
            f"{COMMAND} --html /nowhere/x.html",
            "/nowhere/x.html cannot be written .No such file or directory.; give",
        ),
        (f"{COMMAND} --html .", ". cannot be written .No such file or directory.; give"),
    ],
)
def test_mistakes(words, sentence):
    with pytest.raises(UsageError, match=sentence):
        main(words.split())


@pytest.mark.parametrize("name, bubble", [("1f1b", "24.3 %"), ("zero-bubble", "15.9 %")])
def test_a_row_of_a_papers_table_is_one_command(name, bubble):
    costs = "F=18.522,B=18.086,W=9.337,SEND=0.601"  # of Qi et al., 2024: 0.2431, 0.1585
    text = main(f"--pipeline {name} --stages 8 --microbatches 24 --costs {costs}".split())
    assert f"bubble            {bubble}" in text
    assert "backward 27.423 ms, 18.086 + 9.337, message 601 us" in text


@pytest.mark.parametrize(
    "more, grid, legend, bubble",
    [
        (
            "--costs B=3,W=2",
            "rank 1  .  F0 B0------------ F1 B1------------|.  .  .  .  .",
            "a backward takes 5, a message none.",
            "33.3 %",
        ),
        (
            "--network alpha_us=0,gbit=8 --bytes 976.5625k",  # 1 ms a message
            "rank 1  .  .  F0 B0--- F1 B1---|.  .  .",
            "a backward takes 2, a message 1.",
            "45.5 %",
        ),
        (
            "--network alpha_us=500,gbit=8000",
            "rank 1  .  .  F0 B0--- F1 B1---|.  .",
            "a backward takes 2, a message 0.501; drawn to the nearest column.",
            "40.0 %",
        ),
    ],
)
def test_the_grid_has_the_times_of_the_figures(more, grid, legend, bubble):
    text = main(f"--pipeline 1f1b --stages 2 --microbatches 2 {more}".split())
    assert grid in text.splitlines(), text
    assert legend in text and bubble in text, text
