"""The benchmark as a user starts it: what it prints and writes, and how it ends."""

import re
import signal
from pathlib import Path

import pytest

from benchmarks.collectives.options import algorithms, known, parse
from benchmarks.collectives.rows import TABLE
from nnmpi.command import HelpAsked
from nnmpi.errors import UsageError
from tests.benchmarks.collectives_job import ROOT, bench, read
from tests.harness.slow import once_more
from tests.train.jobs import once, send

FIELDS = {
    *("algorithm", "size", "avg_us", "min_us", "max_us", "p50_us", "p99_us", "iterations", "algbw_gbs", "busbw_gbs"),
    *("predicted_us", "measured_over_predicted", "speed_against_native", "chosen"),
}

# On rank 1 the ring forgets to add what arrives first.
BROKEN_RING = """
from dataclasses import replace
import nnmpi.comm.algorithms.ring as module
right = module.ring_reduce_scatter
def broken(rank, size):
    first, *others = right(rank, size)
    return (replace(first, reduce=False), *others) if rank == 1 else (first, *others)
module.ring_reduce_scatter = broken
"""


@pytest.mark.parametrize("ranks", [once_more(1), 2, once_more(3)])
def test_everything_is_timed_and_right(tmp_path: Path, ranks: int) -> None:
    words = "--min 4 --max 64k --factor 128 --check --iterations 2 --json result.json --plot result.png"
    ending = bench(tmp_path, words, ranks)
    assert ending.status == 0, ending.output
    assert TABLE.head() in ending.output
    assert f"{ranks} on 1 node, " in ending.output
    assert "results verified" in ending.output
    content = read(tmp_path / "result.json")
    rows = content["rows"]
    assert [(row["size"], row["algorithm"]) for row in rows] == [
        (size, name) for size in (4, 512, 65536) for name in algorithms("all-reduce")
    ]
    assert all(set(row) == FIELDS and row["iterations"] == 2 and row["p50_us"] > 0 for row in rows)
    assert all(row["speed_against_native"] == 1 for row in rows if row["algorithm"] == "native")
    assert all((row["chosen"] is not None) == (row["algorithm"] == "auto") for row in rows)
    header = content["header"]
    assert (header["ranks"], header["nodes"], header["finished"], header["checked"]) == (ranks, 1, True, True)
    assert (tmp_path / "result.png").stat().st_size > 5000
    assert sorted(each.name for each in tmp_path.iterdir()) == ["output", "result.json", "result.png"]


@pytest.mark.parametrize("operation", ["broadcast", once_more("all-gather"), once_more("reduce-scatter")])
def test_other_operations_are_timed_and_right(tmp_path: Path, operation: str) -> None:
    words = f"--operation {operation} --min 8 --max 80000 --factor 10000 --dtype float64 --check --iterations 2"
    ending = bench(tmp_path, words, ranks=3)
    assert ending.status == 0, ending.output
    for name in algorithms(operation):
        assert sum(line.startswith(f"{name} ") for line in ending.output.splitlines()) == 2


def test_a_wrong_result_is_one_sentence_and_status_1(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BROKEN_RING)
    words = "--algorithms native,ring --min 4k --max 16k --check --iterations 2 --json result.json"
    ending = bench(tmp_path, words, ranks=3)
    assert ending.status == 1, ending.output
    sentence = "rank 0 of 3 has a wrong result of ring with 4 KB of float32, call 0: element 0 is 90 and must be 154"
    assert ending.output.count("has a wrong result of ring with 4 KB of float32, call 0: element ") == 1, sentence
    assert "Traceback" not in ending.output
    assert ending.seconds < 30


@pytest.mark.parametrize("only_ranks", [True, once_more(False)])
def test_an_interruption_leaves_the_rows_so_far(tmp_path: Path, only_ranks: bool) -> None:
    file = tmp_path / "result.json"
    begun = once(
        lambda: file.exists() and len(read(file)["rows"]) >= 4,
        lambda: send(signal.SIGINT, str(file), "ranks" if only_ranks else "all"),
        ends=False,
    )
    words = f"--algorithms native,ring --factor 2 --budget-s 0.5 --json {file}"
    ending = bench(tmp_path, words, 3, begun)
    assert ending.status not in (0, None), ending.output
    content = read(file)
    assert 4 <= len(content["rows"]) < 50
    assert len(content["rows"]) % 2 == 0
    assert content["header"]["finished"] is False
    assert "Traceback" not in ending.output
    assert [each.name for each in tmp_path.glob(".result*")] == []
    if only_ranks:
        assert ending.output.count("interrupted; ") == 1


def test_wrong_use_is_one_sentence_and_status_2(tmp_path: Path) -> None:
    """Of what only the job finds; for words alone see below."""
    ending = bench(tmp_path, "--json missing/a.json", ranks=2)
    assert ending.status == 2, ending.output
    assert ending.output.count("--json missing/a.json cannot be written: No such file or directory") == 1
    assert "Traceback" not in ending.output
    assert "avg us" not in ending.output


def test_help_is_printed_once(tmp_path: Path) -> None:
    ending = bench(tmp_path, "--help", ranks=2)
    assert ending.status == 0
    assert ending.output.count("usage: mpirun -n P python benchmarks/collectives") == 1


@pytest.mark.parametrize(
    ("missing", "words", "sentence"),
    [
        ("cupy", "--backend cupy", "backend cupy cannot be used: cupy cannot be imported"),
        ("matplotlib", "--plot a.png", "--plot needs matplotlib; install it (pip install 'nnmpi[plot]')"),
        ("torch", "--algorithms native,gloo", "gloo is PyTorch's and torch is not installed; pip install torch"),
    ],
)
def test_what_is_not_installed_is_named_before_anything_is_measured(
    tmp_path: Path, missing: str, words: str, sentence: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.machinery as machinery\n"
        "find = machinery.PathFinder.find_spec\n"
        "def hide(name, *rest):\n"
        f"    return None if name.partition('.')[0] == {missing!r} else find(name, *rest)\n"
        "machinery.PathFinder.find_spec = hide\n"
    )
    ending = bench(tmp_path, words)
    assert ending.status == (1 if missing == "cupy" else 2), ending.output
    assert ending.output.count(sentence) == 1
    assert "avg us" not in ending.output


# The benchmark's command line, without running anything.


README = ROOT / "benchmarks" / "collectives" / "README.md"


def test_without_words_everything_is_timed_from_4_bytes_to_64_megabytes() -> None:
    options = parse([])
    assert options.sizes == tuple(4 * 4**i for i in range(13))
    assert options.algorithms == algorithms("all-reduce")
    assert (options.dtype, options.operation, options.backend, options.check) == (
        "float32",
        "all-reduce",
        "numpy",
        False,
    )
    assert options.everything


def test_words_are_read() -> None:
    words = "--algorithms ring,native,ring --min 1k --max 8KB --factor 2 --dtype float64 --check --iterations 3"
    options = parse([*words.split(), "--json", "a/b.json", "--plot", "c.svg", "--fit", "fit.json", "--refit"])
    assert options.algorithms == ("ring", "native")
    assert not options.everything
    assert options.sizes == (1024, 2048, 4096, 8192)
    assert (options.check, options.iterations, options.refit) == (True, 3, True)
    assert (options.json, options.plot, options.fit) == (Path("a/b.json"), Path("c.svg"), Path("fit.json"))


@pytest.mark.parametrize("operation", ["all-reduce", "broadcast", "all-gather", "reduce-scatter"])
def test_every_operation_has_its_own_algorithms(operation: str) -> None:
    options = parse(["--operation", operation])
    assert options.algorithms[0] == "native"
    assert {"ring", "tree"} < set(options.algorithms) <= set(known(operation))


def test_all_can_be_added_to() -> None:
    options = parse(["--algorithms", "all,gloo"])
    assert options.algorithms == (*algorithms("all-reduce"), "gloo")


def test_sizes_are_whole_elements_and_come_once() -> None:
    assert parse(["--dtype", "float64", "--min", "4", "--max", "12", "--factor", "2"]).sizes == (8,)
    assert parse(["--min", "5", "--max", "10", "--factor", "2"]).sizes == (4, 8)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--algorithms native,rig", "--algorithms 'rig' is unknown; the names are all, native, "),
        (
            "--algorithms ps --operation broadcast",
            "--algorithms 'ps' is unknown; the names are all, native, ring, tree",
        ),
        ("--algorithms ,", "argument --algorithms: ',' names nothing"),
        ("--operation alltoall", "argument --operation: 'alltoall' is unknown; the names are all-reduce, broadcast"),
        ("--min many", "argument --min: 'many' is not a number of bytes"),
        ("--max 3x", "argument --max: '3x' is not a number of bytes"),
        ("--min 1m --max 4k", "--min 1 MB is more than --max 4 KB"),
        ("--min 1 --max 2", "--max 2 B has no room for one element; give at least 4"),
        ("--factor 1", "argument --factor: '1' is not a whole number above 1"),
        ("--dtype float16", "argument --dtype: 'float16' is unknown; the names are float32, float64, int16"),
        ("--backend jax", "argument --backend: 'jax' is unknown; the names are numpy, cupy"),
        ("--iterations 0", "argument --iterations: '0' is not a whole number above 0"),
        ("--budget-s nan", "argument --budget-s: 'nan' is not a number of seconds above 0"),
        ("--budget-s soon", "argument --budget-s: 'soon' is not a number of seconds above 0"),
        ("--plot figure.txt", "argument --plot: figure.txt: the name must end in .png, .svg, .pdf"),
        ("--json=", "argument --json: the path is empty"),
        ("--jsn file", "unrecognized arguments: --jsn file"),
        ("--json", "argument --json: expected one argument"),
    ],
)
def test_wrong_words_are_one_sentence(words: str, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(words.split())
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


def test_options_in_the_readme_exist() -> None:
    with pytest.raises(HelpAsked) as caught:
        parse(["--help"])
    named = set(re.findall(r"(?<!-)--[a-z][a-z-]*", README.read_text())) - {"--nproc-per-node"}
    assert {"--algorithms", "--refit", "--check"} < named
    assert [option for option in named if option not in str(caught.value)] == []


def test_help_lists_every_option() -> None:
    with pytest.raises(HelpAsked) as caught:
        parse(["--min", "wrong", "-h"])
    for option in (
        "--algorithms",
        "--operation",
        "--min",
        "--max",
        "--factor",
        "--dtype",
        "--check",
        "--json",
        "--fit",
    ):
        assert option in str(caught.value)
