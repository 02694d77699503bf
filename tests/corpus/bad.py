"""Bad inputs by a seed: files of every kind, command lines, configurations, runs, submissions.

    python -m tests.corpus 5000            # the corpus; each case that fails is told by its number
    python -m tests.corpus 1 --first 4711  # one of them again

A case takes good files, damages one, and runs a command on them. It must end within SECONDS, by a
result or by an error of nnmpi; any other exception, memory beyond BYTES, or a status of success
for a damage that no reader could miss is a failure.
"""

import contextlib
import gzip
import io
import json
import os
import resource
import shutil
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np

import nnmpi
from nnmpi import NnmpiError, simulate
from nnmpi.base.errors import HelpAsked
from nnmpi.commands import evaluate, export, generate, predict
from nnmpi.data import load_tokenizer
from nnmpi.data.arrays import load_arrays, read_npz
from nnmpi.data.images import load_cifar, load_idx, read_image
from nnmpi.data.readers import read_documents, read_table
from nnmpi.data.tables import TableRules
from nnmpi.lab import doctor, plan, report
from nnmpi.lab.comm import main as comm
from nnmpi.models.torch_weights import read_torch
from nnmpi.teaching.exercise.solution import Solution
from nnmpi.teaching.grade import read_assignment
from nnmpi.train.cli import main as train
from nnmpi.train.config import all_options

SECONDS, BYTES = 10, 2 << 30
ROOT = Path(__file__).parents[2]
HOSTILE = (
    *(None, True, 0, -1, 1, 3, 10**6, 10**30, -(10**30), 0.5, 1e30, 1e-300, "", "x", "nan", "../x"),
    *(
        "/dev/zero",
        "\udcff",
        "\x00",
        "a" * 300,
        "é",
        "--help",
        [],
        [[]],
        [0],
        [1, -1],
        {},
        {"a": 1},
    ),
)
TEXTS = (
    *(
        b"",
        b"{",
        b"[]",
        b"null",
        b"NaN",
        b"1e999",
        b"\xff\xfe",
        b"\0" * 99,
        b"[" * 10**5,
        b"\n" * 999,
    ),
    *(b'{"a": Infinity}', b'"\\ud800"', b"9" * 5000, b"\xef\xbb\xbf", b"PK\x05\x06" + bytes(18)),
)


class Overtime(BaseException):
    """A case that has not ended in time."""


@dataclass(frozen=True)
class Bad:
    """A case.

    Attributes:
        what: what is damaged, and how, and the command, for messages.
        act: runs it.
        must_fail: whether success would be wrong.
    """

    what: str
    act: Callable[[], object]
    must_fail: bool = False


def make_good(place):
    """Write good files of every kind, and two runs, to damage copies of."""
    place.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(0)
    x, y = draw.integers(0, 255, (60, 6, 5), np.uint8), np.arange(60) % 3
    np.savez(place / "a.npz", x=x, y=y)
    rows = "".join(f"{i % 7},{i % 5},{'xyz'[i % 3]}\n" for i in range(60))
    (place / "a.csv").write_text(f"p,q,kind\n{rows}")
    (place / "b.csv.gz").write_bytes(gzip.compress(rows.encode()))
    (place / "a.txt").write_text("the quick brown fox\n" * 30)
    (place / "a.jsonl").write_text('{"text": "the quick brown fox"}\n' * 30)
    idx = place / "idx"
    idx.mkdir()
    for part in ("train", "t10k"):
        head = bytes([0, 0, 8, 3]) + b"".join(n.to_bytes(4, "big") for n in x.shape)
        (idx / f"{part}-images-idx3-ubyte").write_bytes(head + x.tobytes())
        head = bytes([0, 0, 8, 1]) + (60).to_bytes(4, "big")
        (idx / f"{part}-labels-idx1-ubyte").write_bytes(head + y.astype(np.uint8).tobytes())
    cifar = place / "cifar"
    cifar.mkdir()
    for name in ("test_batch", "data_batch_1"):
        (cifar / f"{name}.bin").write_bytes(draw.integers(0, 9, 3073 * 3, np.uint8).tobytes())
    with contextlib.suppress(ImportError):
        from PIL import Image

        for name in ("a.png", "a.bmp", "a.gif", "a.tif"):
            Image.fromarray(x[0]).save(place / name)
    shutil.copy(ROOT / "examples/assignments/my-all-reduce/assignment.toml", place / "a.toml")
    (place / "ring_all_reduce.py").write_text("def ring_all_reduce(rank, size):\n    return []\n")
    for words in (
        f"--dataset {place}/a.csv --model mlp --hidden 4 --epochs 2 --save-every 2steps --keep-best"
        f" --out {place}/mlp",
        f"--dataset {place}/a.txt --model gpt --features 8 --heads 2 --layers 1 --context 8"
        f" --max-steps 4 --save-every 2steps --trace --out {place}/gpt",
    ):
        simulate(lambda group, words=words: train([*words.split(), "--quiet"], group), 1)
        simulate(lambda group, words=words: evaluate.main([words.split()[-1]], group), 1)
    simulate(lambda group: export.main([f"{place}/mlp"], group), 1)


def on_one_rank(main, *words):
    """Return a call of a collective command."""
    return lambda: simulate(lambda group: main([*map(str, words)], group), 1)


def _readers(file):
    """Yield what reads a file of this name."""
    kind, folder = file.suffix, file.parent
    if file.name.endswith((".csv", ".csv.gz")):
        named = file.name.startswith("a")
        yield lambda: read_table(file, TableRules(header=named))
        yield lambda: list(read_documents(file, ("p",)))
        yield on_one_rank(predict.main, folder / "mlp", file, *["--no-header"] * (not named))
    if kind == ".npz":
        yield lambda: load_arrays(file, "a", read_npz, "any")
        yield on_one_rank(
            train, "--dataset", file, "--model", "mlp", "--max-steps", 1, "--out", folder / "new"
        )
    if kind in (".txt", ".jsonl"):
        yield lambda: list(read_documents(file))
    if kind in (".png", ".bmp", ".gif", ".tif"):
        yield lambda: read_image(file, (8, 8, 3))
    if kind == ".toml":
        yield lambda: read_assignment(file)
    if kind == ".py":
        yield lambda: Solution(file, "ring_all_reduce", limit_s=3.0).__enter__()
    if folder.name == "idx":
        yield lambda: load_idx(folder, "a")
    if folder.name == "cifar":
        yield lambda: load_cifar(folder, "a")
    if file.name == "tokenizer.json":
        yield lambda: load_tokenizer(file)
    if kind == ".safetensors":
        yield lambda: read_torch(file)


def _commands(run):
    """Return the commands that open a run."""
    longer = ("--max-steps", 6) if run.name == "gpt" else ("--epochs", 3)
    use = (
        on_one_rank(generate.main, run, "--prompt", "the", "--tokens", 2)
        if run.name == "gpt"
        else on_one_rank(predict.main, run, run.parent / "a.csv")
    )
    return [
        on_one_rank(evaluate.main, run),
        on_one_rank(train, "--resume", run, *longer, "--quiet"),
        on_one_rank(export.main, run),
        lambda: report.main([f"{run}"]),
        lambda: doctor.main([f"{run}"]),
        lambda: nnmpi.load(run),
        use,
    ]


def _damage_json(value, draw):
    """Return a JSON value with something hostile somewhere in it."""
    if isinstance(value, dict) and value and draw.random() < 0.85:
        name = draw.choice([*value])
        if draw.random() < 0.15:
            return {key: item for key, item in value.items() if key != name}
        return {**value, name: _damage_json(value[name], draw)}
    if isinstance(value, list) and value and draw.random() < 0.7:
        at = draw.randrange(len(value))
        return [*value[:at], _damage_json(value[at], draw), *value[at + 1 :]]
    return draw.choice(HOSTILE)


def damage(file, draw):
    """Damage a file in place; return how."""
    content = file.read_bytes()
    how = draw.choice(
        ["cut", "flip", "insert", "text", "json", "json", "line", "pipe", "folder", "gone"]
    )
    if how == "cut":
        content = content[: draw.randrange(len(content) + 1)]
    elif how == "flip" and content:
        changed = bytearray(content)
        for _ in range(draw.choice((1, 1, 8))):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        content = bytes(changed)
    elif how == "insert":
        at = draw.randrange(len(content) + 1)
        content = content[:at] + draw.choice(TEXTS)[:5000] + content[at:]
    elif how == "text":
        content = draw.choice(TEXTS)
    elif how in ("json", "line") and file.suffix in (".json", ".jsonl"):
        lines = [content] if file.suffix == ".json" else content.splitlines()
        at = draw.randrange(max(len(lines), 1))
        with contextlib.suppress(ValueError, IndexError):
            lines[at] = json.dumps(_damage_json(json.loads(lines[at]), draw)).encode()
        content = b"\n".join(lines) + b"\n"
    elif how in ("pipe", "folder", "gone"):
        file.unlink()
        if how == "pipe":
            os.mkfifo(file)
        elif how == "folder":
            file.mkdir()
        return how
    file.write_bytes(content)
    return how


def make(number, seed, good, place):
    """Return a case; its files are written into an empty folder."""
    draw = Random(f"{seed}-{number}")
    kind = draw.choice(("file", "file", "run", "run", "run", "words", "config"))
    shutil.copytree(good, place)
    if kind == "file":
        readable = sorted(item for item in place.rglob("*") if item.is_file() and [*_readers(item)])
        file = draw.choice(readable)
        act = draw.choice([*_readers(file)])
        how = damage(file, draw)
        return Bad(f"{file.relative_to(place)}: {how}", act, how in ("pipe", "folder"))
    if kind == "run":
        run = place / draw.choice(("mlp", "gpt"))
        file = draw.choice(sorted(item for item in run.rglob("*") if item.is_file()))
        act = draw.choice(commands := _commands(run))
        how = damage(file, draw)
        about = f"{file.relative_to(place)}: {how}, then command {commands.index(act)}"
        is_config = file == run / "config.json"
        return Bad(about, act, is_config and how in ("pipe", "folder", "gone"))
    options = [option.flag for option in all_options().values()]
    values = [str(item) for item in HOSTILE if not isinstance(item, list | dict) and item != "\x00"]
    words = [draw.choice([*options, *values]) for _ in range(draw.randrange(1, 7))]
    words = [word for word in words if word not in ("/dev/zero", "--trace")]
    base = ["--dataset", f"{place}/a.csv", "--model", "mlp", "--hidden", "4", "--max-steps", "1"]
    if kind == "words":
        main = draw.choice((train, evaluate.main, predict.main, export.main, comm, plan.main))
        before = {train: [*base, "--out", f"{place}/w"], comm: [], plan.main: ["--model", "mlp"]}
        given = [*before.get(main, [f"{place}/mlp"]), *words]
        if main is comm:
            return Bad(f"words: comm {given}", lambda: comm(given))
        return Bad(f"words: {given}", on_one_rank(main, *given))
    file = place / "options.toml"
    lines = [f"{draw.choice(options)[2:]} = {json.dumps(draw.choice(HOSTILE))}" for _ in range(2)]
    file.write_text("\n".join(lines), "utf-8", "replace")
    return Bad(
        f"config: {lines}", on_one_rank(train, *base, "--config", file, "--out", f"{place}/c")
    )


def run(case):
    """Return what is wrong with a case; "" if nothing is."""

    def late(number, frame):
        raise Overtime

    output, began = io.StringIO(), time.monotonic()
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        with (
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            case.act()
        wrong = "success" if case.must_fail else ""
    except (NnmpiError, HelpAsked) as error:
        text = str(error)
        wrong = "no sentence" if not text or "Traceback" in text else ""
    except Overtime:
        wrong = f"longer than {SECONDS} s"
    except SystemExit as left:
        wrong = f"leaves with {left.code}"
    except BaseException as error:
        wrong = f"{type(error).__name__}: {error}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if peak > BYTES:
        wrong = wrong or f"{peak >> 20} MiB"
    return f"{case.what} -> {wrong} ({time.monotonic() - began:.1f} s)" if wrong else ""


def failures(first, count, seed, place):
    """Yield what is wrong with the cases of these numbers."""
    good, here = place / "good", Path.cwd()
    if not good.exists():
        make_good(good)
    os.chdir(place)
    try:
        for number in range(first, first + count):
            case = make(number, seed, good, place / "case")
            if wrong := run(case):
                yield f"{number}: {wrong}"
            shutil.rmtree(place / "case", ignore_errors=True)
    finally:
        os.chdir(here)
