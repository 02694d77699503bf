"""Pictures for slides: a title, rows, an axis, a legend, who sends to whom; the same bytes each
time.
"""

import re

import pytest

from nnmpi.base.picture import Arrow, Bar, Picture
from nnmpi.comm.algorithms.registry import find_collective
from nnmpi.comm.prove import prove
from nnmpi.lab.comm import main as comm
from nnmpi.lab.memory import main as memory
from nnmpi.lab.render.collectives import picture
from nnmpi.lab.schedule import main as schedule
from nnmpi.lab.speedup import main as speedup
from tests.harness.refusals import usage_error

PIPELINE = "--pipeline 1f1b --stages 3 --microbatches 4 --svg"
THIN = "--pipeline interleaved --stages 4 --microbatches 8 --svg"
COMMANDS = [
    (
        comm,
        "render ring --ranks 3 --svg",
        {"all-reduce by ring, 3 ranks: which chunks go where", "rank 2", "rounds", "added"},
    ),
    (
        schedule,
        PIPELINE,
        {
            "1f1b: 3 ranks, 4 microbatches: bubble 33.3 % of all ranks' time",
            "modelled; of each rank: forward 1 ms, backward 2 ms",
            "rank 2",
            "ms",
            "forward",
            "backward",
            "F3",
        },
    ),
    (schedule, THIN, {"0F0", "7F7", "0B7"}),
    (
        memory,
        "plan --layers 6 --budget 50% --svg",
        {
            "A plan of 6 layers (equal layers): at most 16 MiB",
            "layer 5",
            "actions",
            "forward",
            "backward",
            "kept",
            "waits",
            "freed",
        },
    ),
]


@pytest.mark.parametrize("main, words, texts", COMMANDS, ids=["comm", "schedule", "thin", "memory"])
def test_commands_draw_for_slides(main, words, texts, tmp_path):
    pytest.importorskip("matplotlib")
    files = tmp_path / "a.svg", tmp_path / "b.svg"
    for file in files:
        main([*words.split(), str(file)])
    result = files[0].read_text()
    assert texts <= set(re.findall(r">([^<>]+)</text>", result)) and result == files[1].read_text()
    usage_error(
        r"a\.gif must end in \.svg, \.png, \.pdf; .* such as picture\.svg",
        lambda: main([*words.split(), str(tmp_path / "a.gif")]),
    )
    usage_error(
        r"none/a\.svg cannot be written .*, such as picture\.svg",
        lambda: main([*words.split(), str(tmp_path / "none" / "a.svg")]),
    )


@pytest.mark.parametrize(
    "main, words",
    [
        (comm, "render no-such --svg a.svg"),
        (comm, "fit --svg a.svg"),
        (schedule, "--pipeline no-such --stages 3 --microbatches 4 --svg a.svg"),
        (memory, "plan --budget nothing --svg a.svg"),
        (speedup, "--plot a.svg -- --model no-such"),
    ],
)
def test_commands_name_matplotlib_before_they_compute(main, words, monkeypatch):
    monkeypatch.setattr("nnmpi.base.picture.find_spec", lambda name: None)
    usage_error("a.svg is drawn by matplotlib; pip install matplotlib", lambda: main(words.split()))


def test_words_lie_over_nothing(tmp_path):
    """One that its bar is too short for stands behind it, if nothing follows; a picture of nothing
    has an axis, too.
    """
    pytest.importorskip("matplotlib")
    row = [
        Bar("a", 0, 1, "k", "word"),
        Bar("a", 1, 1.001, "k", "gone"),
        Bar("a", 1.001, 2, "k", "last"),
    ]
    Picture("Thin", "", [*row, Bar("b", 0, 0.001, "k", "behind")]).save(tmp_path / "a.svg")
    result = re.findall(r">([^<>]+)</text>", (tmp_path / "a.svg").read_text())
    assert {"word", "last", "behind"} <= set(result) and "gone" not in result
    nothing = Picture("Nothing", "bytes", [Bar("a", 0, 0, "sent", "0")])
    nothing.save(tmp_path / "a.svg")
    assert str(nothing).splitlines()[2] == "a   0"


def test_arrows_are_the_messages_that_are_proved():
    result = picture(tree := find_collective("all-reduce", "tree"), 5)
    assert len(result.arrows) == prove(tree, 5).messages
    assert result.arrows[0] == Arrow("rank 1", 0, "rank 0", 1, "added", "all") and result.kinds == [
        "added",
        "copied",
    ]


def test_more_kinds_than_colours_have_one_again(tmp_path):
    many = Picture("Many", "", [Bar(str(i), 0, 1, f"kind {i}") for i in range(20)])
    assert len(set(str(many))) > 5
    many.save(tmp_path / "many.svg")


def test_a_picture_is_text_too():
    """In scale; a word that a bar is too short for stands behind it; time that is waited is
    dots.
    """
    bars = [
        Bar("a", 0, 1, "computes", "x"),
        Bar("a", 2, 4, "waiting"),
        Bar("long", 1, 1.01, "sends", "word"),
    ]
    lines = str(Picture("Title", "ms", bars)).splitlines()
    assert lines[0] == "Title" and lines[2] == f"a     x{'#' * 15}{' ' * 16}{'.' * 32}"
    assert lines[3] == f"long  {' ' * 16} word" and lines[4].endswith("4 ms")
    assert lines[5].split("   ")[-3:] == ["# computes", ". waiting", "= sends"]
