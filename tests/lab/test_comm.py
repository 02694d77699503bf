"""The command line over collectives: what it says, and one sentence for each mistake."""

import re
import subprocess
import sys

import pytest

from nnmpi import simulate
from nnmpi.base.custom import load_custom
from nnmpi.base.errors import ScheduleError, UsageError
from nnmpi.base.units import format_seconds
from nnmpi.comm.algorithms.registry import ALGORITHMS, COLLECTIVES
from nnmpi.comm.collective import as_collective
from nnmpi.comm.fit import find_network_fit, load_fit, save_fit
from nnmpi.comm.machine import Curve, Machine
from nnmpi.lab.comm import main
from nnmpi.lab.render.collectives import compare, render
from tests.comm.test_fit import make as make_fit
from tests.harness.refusals import refuses, usage_error


def test_prove_and_render():
    assert (
        main(["prove", "ring", "--ranks", "17"])
        == "all-reduce by ring is right on 17 ranks: 32 rounds, 544 messages, 544 chunks sent"
    )
    assert main(["render", "tree", "--ranks", "5"]) == render(ALGORITHMS["tree"], 5)
    assert "all-gather by tree is right" in main(["prove", "tree", "--operation", "all-gather"])


OWN = """
from nnmpi.comm.collective import Step
def doubling(rank, size):
    everything = range(size)
    for distance in (1, 2, 4):
        if distance < size:
            yield Step(rank ^ distance, everything, rank ^ distance, everything, True)
def nothing(rank, size): pass
def numbers(rank, size): return [rank]
def raising(rank, size):
    return [][size]
def lost(rank, size): return [Step(to=size, send=[0])]
"""


def test_what_a_user_wrote_wrong_is_one_sentence(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    for name, sentence in (
        ("nothing", r"nothing\(0, 4\) gives a NoneType; give a list of Step"),
        ("numbers", r"numbers\(0, 4\) gives a int"),
        ("raising", r"raising\(0, 4\) raised IndexError in line 11 of mine.py: list index"),
        ("lost", "rank 0, step 0 talks to rank 4, but the ranks are 0..3"),
    ):
        for command in ("prove", "render", "simulate"):
            refuses(ScheduleError, sentence, main, [command, f"{file}:{name}"])


def test_a_page_leaves_out_ranks_for_which_an_algorithm_is_not_right(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    doubling = as_collective(
        load_custom(f"{tmp_path}/mine.py:doubling", "the algorithm", "(rank, size)")
    )
    shown = compare({"doubling": doubling}, "doubling", 4, Machine.uniform(1.0, 1.0))["algorithms"][
        "doubling"
    ]
    assert list(shown["animations"]) == list(shown["costs"]) == [2, 4, 8]
    refuses(
        ScheduleError,
        "rank 1, step 1 talks to rank 3",
        lambda: compare({"doubling": doubling}, "doubling", 3, Machine.uniform(1.0, 1.0)),
    )


def test_simulate_and_list():
    words = ["--ranks", "4", "--bytes", "400", "--network", "alpha=1,beta=0.25,gamma=0.125"]
    text = main(["simulate", "ring", *words])
    assert text.startswith(
        "all-reduce by ring, 4 ranks, 400 B: 193.5 s, messages by alpha=1,beta=0.25,gamma=0.125\n"
    )
    assert text.endswith("\nall ranks finish at once")
    uneven = main(["simulate", "tree", "--ranks", "5", *words[2:]])
    assert re.search(r"\nthe first to finish: ranks? [0-4, -]+, after [\d.]+ s$", uneven)
    assert (
        main(["list", "--network", "gbit=10"]).splitlines()[1] == "messages by gbit=10 (no latency)"
    )
    listed = {tuple(line.split()[:2]): line for line in main(["list", *words]).splitlines()[4:]}
    assert listed["all-reduce", "ring"].split()[2:] == [
        "6",
        "alpha",
        "+",
        "1.500",
        "M",
        "beta",
        "193.5",
        "s",
    ]
    assert len(listed) == len(COLLECTIVES)


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("frob", "frob is not a command; give list, prove, render, simulate, fit"),
        ("prove rong", "all-reduce has no algorithm 'rong'; choose one of ring, tree, star"),
        ("prove ring --operation foo", "no collective 'foo'; choose one of all-reduce"),
        ("simulate ring --bytes x", "--bytes is x; it must be a number of bytes such as 512MiB"),
        (
            "prove tree --ranks 5000",
            "tree on 5000 ranks would take 17 h 21 min or so; ask for fewer",
        ),
        ("simulate ring --ranks 0", "--ranks is 0; give a whole number, 1 or more"),
        (
            "simulate ring --network alpha=nan",
            "network 'alpha=nan' is not understood; give numbers, such as",
        ),
        ("simulate ring --alpha 1e-5", "--alpha is not an option; did you mean --network?"),
        ("simulate ring --network nowhere.json", "nowhere.json: not a readable fit"),
        ("prove ring --bytes 4", "--bytes is not an option"),
        ("render ring --network gbit=1", "--network changes nothing of this render; leave it out"),
    ],
)
def test_mistakes_are_told_in_a_sentence(words, sentence):
    with pytest.raises(UsageError) as error:
        main(words.split())
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_a_mistake_ends_with_status_2_and_needs_no_mpi():
    code = (
        "import sys, runpy; sys.modules['mpi4py'] = None; runpy.run_module('nnmpi.lab.comm',"
        " run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "prove", "x"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "all-reduce has no algorithm 'x'" in done.stderr


def test_strange_machines_are_simulated_as_asked():
    def simulated(network):
        words = ["simulate", "ring", "--ranks", "4", "--bytes", "4MB"]
        return main([*words, "--network", network]).splitlines()[0].partition(", messages by")[0]

    even = simulated("beta=1e-9")
    assert simulated("beta=1e-9,per_node=2") == simulated("gbit=8") == even
    for strange in (
        "beta=5e-9,inside_beta=1e-9",
        "beta=1e-9,alpha=1,inside_beta=1e-9",
        "beta=1e-9,gamma=1e-9",
    ):
        assert simulated(f"{strange},per_node=2") != even


def test_a_fit_is_priced_on_its_own_nodes_and_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("NNMPI_DATA", str(tmp_path))
    file = tmp_path / "fit-host-4-ranks.json"
    save_fit(make_fit(), file)  # 4 ranks on 2 nodes
    assert find_network_fit("fit", None) == make_fit()
    text = main(["simulate", "hierarchical", "--bytes", "1MB", "--network", str(file)])
    assert format_seconds(make_fit().predict("hierarchical", 2**20)) in text.splitlines()[0]
    usage_error(
        "there is no fit of 5 ranks on 1 node; make one with mpirun -n 5 nnmpi comm fit",
        main,
        ["list", "--ranks", "5", "--network", str(file)],
    )


RATIOS = ((1024, 1.2), (2**20, 0.9))  # measured over predicted


@pytest.mark.parametrize("load", [0.0, 1e6])
def test_a_fit_of_a_busy_machine_says_so(load, tmp_path, monkeypatch):
    (group,) = simulate(lambda group: group, 1)
    fit = make_fit()
    sums = {"ring": Curve(((4, 9.0), *((n, f * fit.predict("ring", n)) for n, f in RATIOS)))}
    made = {
        "start": lambda: group,
        "measure": lambda group, say: fit,
        "measure_sums": lambda *_: sums,
    }
    for name, function in made.items():
        monkeypatch.setattr(f"nnmpi.lab.comm.{name}", function)
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    said = main(["fit", "--out", str(tmp_path / "fit.json")])
    assert ("these times are unreliable" in said) == (load > 0)
    assert "steps took 0.90 to 1.20 of their predictions" in said
    assert load_fit(tmp_path / "fit.json").describe_error() in said
    assert "nnmpi comm fit measures it" in fit.describe_error()


def test_a_name_that_one_operation_has_needs_no_operation():
    assert main(["prove", "gossip"]).startswith("neighbour-average by gossip is right")
