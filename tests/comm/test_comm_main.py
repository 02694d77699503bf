"""The command line over collectives: what it says, and one sentence for each mistake."""

import subprocess
import sys

import pytest

from nnmpi.comm.__main__ import main
from nnmpi.comm.algorithms.registry import ALGORITHMS
from nnmpi.comm.render import render
from nnmpi.errors import UsageError


def test_prove_and_render() -> None:
    assert main(["prove", "ring", "--ranks", "17"]) == (
        "all-reduce by ring is right on 17 ranks: 32 rounds, 544 messages, 544 chunks sent"
    )
    assert main(["render", "tree", "--ranks", "5"]) == render(ALGORITHMS["tree"], 5)
    assert "all-gather by tree is right" in main(["prove", "tree", "--operation", "all-gather"])


def test_price_and_simulate_say_the_same_time() -> None:
    words = ["--ranks", "4", "--bytes", "400", "--alpha", "1", "--beta", "0.25", "--gamma", "0.125"]
    priced = main(["price", "ring", *words])
    assert priced.startswith("all-reduce by ring, 4 ranks, 400 B: 193.5 s\n")
    assert "6 latencies, 600 bytes sent, 300 added" in priced
    simulated = main(["simulate", "ring", *words])
    assert simulated.splitlines()[0] == priced.splitlines()[0]
    assert "24 messages" in simulated


def test_the_table_has_the_course_and_the_steps() -> None:
    shown = main(["cost", "--ranks", "16", "--bytes", "64k", "--alpha", "1e-3", "--beta", "0"]).splitlines()
    server = next(line for line in shown if line.startswith("parameter server"))
    assert "2 alpha + 2 (N-1) M beta" in server and " 2 ms " in server and " 30 ms " in server
    assert "one message after another" in server


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("", "required: COMMAND"),
        ("frob", "invalid choice: 'frob'"),
        ("prove rong", "no all-reduce by 'rong'; the names are ring, tree, ps"),
        ("prove ring --operation foo", "no collective 'foo'; there are all-reduce"),
        ("price ring --bytes x", "'x' is not a number of bytes; write it like 4, 64k"),
        ("price ring --ranks 0", "'0' is not a number of ranks"),
        ("price ring --alpha nan", "'nan' is not a number of seconds"),
        ("render ring --bytes 4", "unrecognized arguments: --bytes 4"),
    ],
)
def test_mistakes_are_told_in_a_sentence(words: str, sentence: str) -> None:
    with pytest.raises(UsageError) as error:
        main(words.split())
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_a_mistake_ends_with_status_2_and_needs_no_mpi() -> None:
    code = "import sys, runpy; sys.modules['mpi4py'] = None; runpy.run_module('nnmpi.comm', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code, "prove", "x"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "there is no all-reduce by 'x'" in done.stderr
