"""Speed-up over ranks: numbers on simulated clocks, which are the same on every machine, and what
is refused.
"""

import json
import re
import subprocess
import sys

import pytest

from nnmpi.base.errors import LaunchError
from nnmpi.lab.speedup import main
from tests.harness.refusals import refuses, usage_error

WORDS = (
    "-- --model mlp --hidden 64 --network alpha_us=50,gbit=1 --allreduce ring --slow ms=5"
    " --max-steps 20"
)


@pytest.mark.parametrize("more, times", [("--weak", 1), ("", 2)])
def test_a_step_that_takes_as_long_everywhere_and_a_ring(more, times, tmp_path):
    """5 ms and the ring's sum; with as much for each rank two of them are nearly twice as fast,
    else none is faster.
    """
    file, picture = tmp_path / "found.json", tmp_path / "found.svg"
    table = main(f"--ranks 1,2 --simulate {more} --json {file} --plot {picture} {WORDS}".split())
    item, two = json.loads(file.read_text())
    assert item["step_s"] == pytest.approx(5e-3)
    assert two["step_s"] == pytest.approx(5e-3 + two["sum_s"], rel=0.05)
    assert (
        two["speedup"]
        == pytest.approx(two["efficiency"] * 2)
        == pytest.approx(5e-3 / two["step_s"] * 2 / times)
    )
    assert two["predicted"] == pytest.approx(two["speedup"], rel=0.05)  # the columns agree
    assert ("--weak gives them more work" in table) == (more == "")
    assert table.splitlines()[2].split()[0] == "2"
    drawn = re.findall(r"<!-- (.*?) -->", picture.read_text())
    each = " per rank" if more else ""
    title = f"mlp on digits, batch 32{each}, simulated, links alpha_us=50,gbit=1"
    assert title in " ".join(drawn)  # a long title has two lines


@pytest.mark.parametrize(
    "words, text",
    [
        ("--ranks 2,1", "2,1 does not increase"),
        ("--ranks 2,x", "--ranks is 2,x; it must be a list of whole numbers"),
        ("-- --out here", "--out is chosen by this command"),
        ("--ranks 1 --simulate -- --max-steps 3", "fewer than 10 steps"),
        (
            "--ranks 1 --simulate --plot x.nothing -- --max-steps 10",
            "x.nothing must end in .svg, .png, .pdf",
        ),
    ],
)
def test_what_means_nothing_is_refused(words, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    usage_error(text, lambda: main(words.split()))


def test_a_run_that_fails_says_why():
    refuses(
        LaunchError,
        "on 1 rank ended with status 2: --modl is not an option",
        main,
        ["--ranks", "1", "--simulate", "--", "--modl", "cnn"],
    )


@pytest.mark.parametrize("more, known", [("", True), ("--zero 1", False)])
def test_the_model_says_nothing_of_what_it_does_not_know(more, known, tmp_path):
    """Words mean what they mean to the train command, in its spellings."""
    words = WORDS.replace("--max-steps", "--max_steps").split()
    text = main(
        [
            *["--ranks", "2,3", "--simulate", "--weak", "--json"],
            str(tmp_path / "found"),
            *words,
            *more.split(),
        ]
    )
    rows = json.loads((tmp_path / "found").read_text())
    assert (
        (rows[1]["predicted"] is not None)
        is known
        is ("-: the cost of sums is unknown" not in text)
    )
    assert [row["samples_per_second"] * row["step_s"] for row in rows] == pytest.approx(
        [64, 96], rel=0.02
    )


@pytest.mark.parametrize(
    "words, status", [("--ranks 2,1", 2), ("--ranks 1,2 --simulate " + WORDS, 0)]
)
def test_the_status_says_whether_it_could(words, status):
    ran = subprocess.run(
        [sys.executable, "-m", "nnmpi", "speedup", *words.split()], capture_output=True, check=False
    )
    assert ran.returncode == status, ran.stderr


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_short_run_with_a_network_is_refused(ranks):
    usage_error(
        "fewer than 10 steps",
        lambda: main(["--ranks", ranks, "--simulate", *WORDS.replace("20", "3").split()]),
    )
