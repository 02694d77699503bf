"""README.md and docs/ are true: their programs run, options and files that they name exist, the map
is complete.

Links and anchors are checked where the pages are built (`scripts/docs`).
"""

import contextlib
import difflib
import io
import os
import re
import runpy
import subprocess
import sys
import textwrap
import traceback
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from nnmpi import nn, simulate
from nnmpi.base.command import flag_of
from nnmpi.comm import algorithms
from nnmpi.comm.algorithms.registry import COLLECTIVES
from nnmpi.commands.table import COMMANDS, find_command
from nnmpi.data import NAMES, Dataset
from nnmpi.data.readers import READERS
from nnmpi.data.transform import AUGMENTATIONS
from nnmpi.parallel.compressed import COMPRESSIONS
from nnmpi.parallel.pipeline.stage import Flight
from nnmpi.train.cli import main as train
from nnmpi.train.config import MODELS, SCHEDULES
from tests.harness.slow import PAGES_WRITTEN
from tests.layering.rules import Tree, dead_references

ROOT = Path(__file__).parents[1]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if "_build" not in path.parts
}
README = PAGES["README.md"]
PROGRAMS = {
    name: programs
    for name, text in PAGES.items()
    if (programs := re.findall(r"```python\n(.*?)```", text, re.DOTALL))
}
EACH = "import sys\nfor program in sys.argv[1:]: exec(program, {'__name__': '__main__'})"
# fitted in one call, and trained by hand; they print their epochs
FIRST = [("README.md", 0), ("docs/library.md", 0), ("docs/library.md", 5)]
READERS_FILES = {
    "first.py",
    "signs.py",
    "digits.py",
    "port.py",
    "relay.py",
    "pairs.py",
    "net.py",
    "mine.py",
}

OPTION = re.compile(r"(?<![-\w])--[a-z][-a-z]*")
# Options of mpirun and of benchmarks/training, in sentences; and a page with tables of them.
OTHERS_OPTIONS = {
    "--no-deps",
    "--help",
    "--host",
    "--oversubscribe",
    "--allow-run-as-root",
    "--mca",
}
OTHERS_OPTIONS |= {"--cases", "--sharded"}
OTHERS_PAGES = {"docs/results.md", "docs/cluster.md"}


@pytest.mark.mpi
@pytest.mark.host_only("a program of its own, in which nothing is said of a device")
@pytest.mark.parametrize("page, number", FIRST)
def test_the_first_programs_train(page, number, group, capsys):
    """As they stand, on every number of ranks; they reach 97 % and print on rank 0 alone."""
    exec(compile(PROGRAMS[page][number], page, "exec"), {"__name__": "__main__"})
    accuracy = r"^epoch .* test (?:accuracy |[0-9.]+, )([0-9.]+) ?%"
    lines = re.findall(accuracy, capsys.readouterr().out, re.M)
    printed = [float(result) for result in lines]
    everyone = group.gather(printed)
    assert len(everyone[0]) == 8 and everyone[0][-1] > 97, everyone
    assert not any(everyone[1:]), everyone


@pytest.mark.parametrize("page, changed", [("pytorch", 9), ("horovod", 34)])
def test_scripts_are_ported(page, changed, monkeypatch, capsys, tmp_path):
    """The lines that differ are counted; the port learns, on images of its size that are learned
    quickly.
    """
    theirs, ours = (
        text.splitlines()
        for text in re.findall(r"```py\n(.*?)```", PAGES[f"docs/{page}.md"], re.DOTALL)[:2]
    )
    changes = difflib.SequenceMatcher(None, theirs, ours, autojunk=False).get_opcodes()
    count = sum(
        max(end - begin, stop - start)
        for kind, begin, end, start, stop in changes
        if kind != "equal"
    )
    assert 35 < len(theirs) < 45 and count == changed, changes
    y = np.arange(480) % 10
    x = (
        np.random.default_rng(0).integers(0, 60, (480, 28, 28, 1))
        + 190 * (y // 5)[:, None, None, None]
    ).astype("uint8")
    x[:, :, :14] //= (1 + y % 5)[:, None, None, None].astype("uint8")
    sets = [
        Dataset("images", x[part], y[part], 10, 1 / 255) for part in (slice(240), slice(240, None))
    ]
    monkeypatch.setattr("nnmpi.data.load", lambda name, folder: sets)
    monkeypatch.chdir(tmp_path)  # the port writes its weights
    program = "\n".join(ours).replace("range(3)", "range(2)").replace("lr=0.01", "lr=0.05")
    program = program.replace("batch_size=64", "batch_size=16").replace("32 * group.size", "16")
    exec(compile(program, page, "exec"), {"__name__": "__main__"})
    assert float(re.findall(r"epoch 2: accuracy ([0-9.]+)%", capsys.readouterr().out)[0]) > 20


def test_mistakes_are_named_as_the_page_shows():
    """Each program of docs/debugging.md ends with the error below it, up to the first number or
    path.
    """
    pairs = re.findall(
        r"```py\n((?:(?!```).)*)```\n\n    (\w+): (.*?)(?:[:;(\d]|\n\n)",
        PAGES["docs/debugging.md"],
        re.DOTALL,
    )
    assert len(pairs) == 2
    for program, kind, words in pairs:
        with pytest.raises(Exception, match=re.escape(words.strip())) as caught:
            exec(compile(program, "debugging.md", "exec"), {"__name__": "__main__"})
        assert type(caught.value).__name__ == kind


@pytest.mark.parametrize("page", PROGRAMS)
def test_programs_run(page, tmp_path):
    """A page's in one fresh interpreter, each with names of its own, and in a folder of their own,
    but for those that the test above runs.
    """
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", EACH]
        + [text for n, text in enumerate(PROGRAMS[page]) if (page, n) not in FIRST],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.slow(PAGES_WRITTEN)
def test_simulated_speed_ups_are_what_the_page_shows(tmp_path):
    pytest.importorskip("matplotlib")
    command, table = re.findall(
        r"^    nnmpi (speedup .*?)\n\n(.*?)\n\n", PAGES["docs/simulated.md"], re.M | re.S
    )[0]
    ran = subprocess.run(
        [sys.executable, "-m", "nnmpi", *command.replace("\\\n", " ").split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert textwrap.dedent(table) in ran.stdout, ran


def test_the_map_shows_all_packages_and_modules():
    """With nothing left out and nothing that is not there."""
    block = PAGES["docs/house.md"].split("## The map")[1].split("\n\n")[1]
    shown = {
        line.split()[0].rstrip("/") for line in block.splitlines() if re.match(r" {6}\S", line)
    }
    there = {
        path.stem
        for path in (ROOT / "nnmpi").iterdir()
        if path.suffix == ".py" and path.stem != "__init__"
    }
    packages = {path.name for path in (ROOT / "nnmpi").iterdir() if (path / "__init__.py").exists()}
    assert {name.removesuffix(".py") for name in shown} == there | packages


def help_of(words, monkeypatch):
    """Return the help of all options of `nnmpi WORDS`, or of `python -m WORDS`; nnmpi's fit a
    terminal of 100 columns.
    """
    printed = io.StringIO()
    is_command = words.startswith("nnmpi ")
    name, *more = words.removeprefix("nnmpi ").split()
    if is_command:
        name = find_command(name)
    monkeypatch.setattr(sys, "argv", [name, *more, "--help", "all"])
    for module in (f"{name}.__main__", name):  # other tests may have imported it
        if not hasattr(sys.modules.get(module), "__path__"):
            monkeypatch.delitem(sys.modules, module, raising=False)
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    assert 40 < max(map(len, printed.getvalue().splitlines())) <= (100 if is_command else 120)
    return printed.getvalue()


def test_options_that_are_named_exist(monkeypatch):
    """On each line with a command of nnmpi's, those of the command; in backquotes, those of any."""
    commands = [*(f"nnmpi {name}" for name in COMMANDS), "tests.harness"]
    helped = {command: help_of(command, monkeypatch) for command in commands}
    for command in re.findall(r"^    ([a-z]+) +[A-Z]", helped["nnmpi comm"], re.MULTILINE):
        helped["nnmpi comm"] += help_of(f"nnmpi comm {command}", monkeypatch)
    helped["scripts/train"] = helped["nnmpi train"]
    for command in ("nnmpi run", "nnmpi speedup"):
        helped[command] += helped["nnmpi train"]  # behind --
    helped["scripts/size"] = (ROOT / "scripts/size").read_text()
    # they add options to pytest
    plugins = (ROOT / f"tests/{folder}/plugin.py" for folder in ("harness", "device"))
    helped["scripts/test "] = helped["tests.harness"] + "".join(
        plugin.read_text() for plugin in plugins
    )
    used = set()
    for page, text in PAGES.items():
        for line in text.replace("\\\n", " ").splitlines():
            if command := next((item for item in helped if item in line), None):
                words = re.split("[#`]", line.split(command)[-1])[0]
                used |= {(page, command, option) for option in OPTION.findall(words)}
        if page not in OTHERS_PAGES:
            quoted = re.findall(r"`[^`\n]*`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
            used |= {(page, "", option) for words in quoted for option in OPTION.findall(words)}
    assert len(used) > 100
    helped[""] = " ".join(helped.values())
    wrong = {item for item in used if not re.search(rf"{item[2]}(?![-\w])", helped[item[1]])}
    assert not {item for item in wrong if item[2] not in OTHERS_OPTIONS}


def test_the_readme_is_short():
    """A page, with few numbers to doubt outside of its programs."""
    prose = re.sub(r"```.*?```|\]\([^)]*\)|^    .*$", "", README, flags=re.DOTALL | re.MULTILINE)
    assert len(README.splitlines()) < 150
    assert len(re.findall(r"(?<![\w-])\d[\d.,]*", prose)) < 40


def test_files_that_are_named_exist():
    """Paths in backquotes below the folders of the checkout, and links, here and in the benchmarks'
    READMEs.
    """
    written = {
        **PAGES,
        **{
            str(path.relative_to(ROOT)): path.read_text()
            for path in ROOT.glob("benchmarks/**/*.md")
        },
    }
    named = {
        (page, path)
        for page, text in written.items()
        for path in re.findall(r"`((?:nnmpi|tests|scripts|benchmarks|docs)/[\w/.-]*)`", text)
    }
    assert len(named) >= 15
    assert not [
        (page, path)
        for page, path in named
        if not (ROOT / path).exists() and path != "docs/_build/html"
    ]
    linked = {
        (page, path)
        for page, text in written.items()
        for path in re.findall(r"\]\((?!https?:)([^)#\s]+)[^)]*\)", text)
    }
    assert len(linked) >= 50
    assert not [(page, path) for page, path in linked if not ((ROOT / page).parent / path).exists()]


def test_modules_that_are_named_exist():
    """In backquotes: paths such as `comm.world`, and files without their folder; the reference has
    each module once.
    """
    described = re.findall(r"automodule:: (\S+)", "\n".join(PAGES.values()))
    assert len(set(described)) == len(described) > 40
    tree = Tree(ROOT)
    assert not [
        sentence for page, text in PAGES.items() for sentence in dead_references(tree, page, text)
    ]
    there = {
        path.name
        for folder in ("nnmpi", "tests", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
    }
    assert (
        not {name for text in PAGES.values() for name in re.findall(r"`(\w+\.py)`", text)}
        - there
        - READERS_FILES
    )


def test_ci_runs_what_the_readme_and_contributing_say():
    """As a user types it: each command is a line of its own in both, but for their comments."""
    given = {
        line.split("#")[0].strip()
        for line in (README + (ROOT / "CONTRIBUTING.md").read_text()).splitlines()
        if line.startswith("    scripts/")
    }
    run = {line.strip() for line in (ROOT / ".ci/run").read_text().splitlines()}
    for command in (
        "scripts/train",
        "scripts/test",
        "scripts/check",
        "scripts/test --rest --gpu",
        "scripts/benchmark-check",
        "scripts/docs",
    ):
        assert command in given and any(line.startswith(f"part {command}") for line in run)
    assert "scripts/test --backend fake --ranks 2 --quick --jobs 2" in given & run


MADE = runpy.run_path(str(ROOT / "docs" / "made.py"))


@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if "<!-- made" in text])
def test_tables_of_what_the_package_knows_are_as_they_are_made(page):
    """`python docs/made.py` writes them."""
    text = PAGES[page]
    assert text.count("<!-- made: ") == text.count(MADE["END"]) == len(MADE["BLOCK"].findall(text))
    assert MADE["made"](text) == text


def test_each_made_table_is_on_a_page():
    text = "".join(PAGES.values())
    assert {name for _, name, _ in MADE["BLOCK"].findall(text)} == MADE["MADE"].keys()


SUFFIXES = {row.suffixes[0] for row in READERS if row.gives != "image"}


@pytest.mark.parametrize(
    ("option", "names"),
    [
        ("dataset", {*NAMES, *SUFFIXES}),
        ("augment", AUGMENTATIONS),
        ("lr_schedule", SCHEDULES),
        ("model", MODELS),
        ("compress", COMPRESSIONS),
    ],
)
def test_the_help_of_an_option_explains_each_name_that_it_takes(option, names, monkeypatch):
    text = " ".join(help_of("nnmpi train", monkeypatch).split())
    told = re.split(r" (?=--[\w-]+ )", text.partition(f" {flag_of(option)} TEXT ")[2])[0]
    assert {*names} <= {*re.findall(r"[\w.-]*\w", told)}


def test_the_page_on_data_says_where_each_kind_of_file_is():
    table = PAGES["docs/data.md"].partition("| files | found |")[2].partition("\n\n")[0]
    assert {*re.findall(r"\.\w+", table)} >= SUFFIXES


def test_the_table_of_layers_has_every_layer():
    table = PAGES["docs/reference/layers.md"].partition("| for |")[2].partition("\n\n")[0]
    kinds = [kind for name in nn.__all__ if isinstance(kind := getattr(nn, name), type)]
    layers = {kind.__name__ for kind in kinds if issubclass(kind, nn.Module)} - {"Module"}
    assert {*re.findall(r"`(\w+)`", table)} == layers


def test_the_files_of_the_algorithms_are_listed_where_one_begins_to_read():
    files = {row.phases[0].__module__.rpartition(".")[2] for row in COLLECTIVES.values()}
    listed = {*re.findall(r"^(\w+)  ", algorithms.__doc__, re.MULTILINE)}
    assert listed == files | {"registry"}


@pytest.mark.parametrize(("page", "option"), MADE["ROWS"])
def test_tables_that_explain_names_have_a_row_for_each(page, option):
    text = (ROOT / "docs" / page).read_text()
    assert MADE["names_in"](text, option) == MADE["ROWS"][page, option]


@pytest.mark.slow(PAGES_WRITTEN)
def test_the_pages_that_run_are_written(tmp_path):
    """A renamed option ended the building of all pages, which only CI does."""
    runpy.run_path(str(ROOT / "docs" / "conf.py"))["write_pages"](SimpleNamespace(outdir=tmp_path))
    assert {file.name for file in (tmp_path / "pages").glob("*.html")} >= {
        "ring.html",
        "1f1b.html",
        "plan.html",
        "run.html",
    }
    assert "url=docs/index.html" in (tmp_path / "index.html").read_text()


@pytest.mark.slow(PAGES_WRITTEN)
def test_pictures_of_the_pages_are_drawn_by_what_they_are_about():
    """Each lesson but the first has one, before its program; the page's theme gives ink and
    paper.
    """
    pytest.importorskip("matplotlib")
    named = {page: re.findall(r"```{drawn} (\w+)", text) for page, text in PAGES.items()}
    assert sum(map(len, named.values())) >= 11 and named["docs/simulated.md"] == ["speedup"]
    draw = runpy.run_path(str(ROOT / "docs" / "conf.py"))["draw"]
    for page, names in named.items():
        for name in names:
            drawn = draw(name)
            assert (
                drawn.count("<text") > 4
                and "var(--color-foreground-primary)" in drawn
                and "#1b1f24" not in drawn
            )
            if "lessons" in page:
                assert (
                    PAGES[page].index("{drawn}")
                    < PAGES[page].index("## The program")
                    < PAGES[page].index("## The diff")
                )


def calls_of(block):
    """Return (file, function) for each call that a block of docs/house.md tells of."""
    rows = [re.match(r" +(\S+) +(\w+(?:, \w+)*)", line) for line in block.strip("\n").splitlines()]
    return [(row[1], name) for row in rows if row for name in row[2].split(", ")]


@pytest.mark.host_only("passes on a device are not replayed, and so are called in a shorter way")
def test_one_update_goes_the_way_that_the_page_follows(tmp_path, monkeypatch):
    section = PAGES["docs/house.md"].split("## One update, followed")[1].split("\n## ")[0]
    (way,) = map(calls_of, re.findall(r"(?:^    .*\n)+", section, re.MULTILINE))
    plain, result = Flight.forward, []

    def watched(*args, **kwargs):
        stack = [
            (item.filename.rpartition("/nnmpi/")[2], item.name)
            for item in traceback.extract_stack()
        ]
        result.append(
            [call for call in stack[stack.index(("train/cli.py", "main")) :] if call in way]
        )
        return plain(*args, **kwargs)

    monkeypatch.setattr(Flight, "forward", watched)
    for name, words in (("whole", ""), ("piped", "--pp 2 --microbatches 2")):
        line = f"--model mlp --dataset digits --max-steps 1 --quiet --out {tmp_path / name} {words}"
        result.clear()
        simulate(partial(train, line.split()), 2)
        assert result[0] == way[1:-1]  # launch is MPI's
