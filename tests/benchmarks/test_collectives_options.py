"""The benchmark's command line, without running anything."""

import re
from pathlib import Path

import pytest

from benchmarks.collectives.options import algorithms, known, parse
from nnmpi.command import HelpAsked
from nnmpi.errors import UsageError
from tests.benchmarks.collectives_job import ROOT

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
