"""Damaged runs, data files and command lines, drawn by a seed: what is not used must be refused in a sentence.

    python -m tests.harness.damage run 1000         # so many of each damage of each file of a run
    python -m tests.harness.damage data 1000        # damaged data files of each kind
    python -m tests.harness.damage words 5000       # command lines and configuration files
    python -m tests.harness.damage layouts 1000     # options that each are right, together, against one rank

A run's checkpoints must be read as they were written, an older one if need be. Nothing may end in a traceback, nor take
longer than LONGEST_S of processor time. Damage is done anywhere in a file: each of its places is as likely.
"""

import contextlib
import gzip
import io
import json
import os
import shutil
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from nnmpi.comm.simulated.simulated_world import simulate
from nnmpi.command import HelpAsked
from nnmpi.data.catalogue import load
from nnmpi.data.text import load_text
from nnmpi.data.token_file import TextSource, prepare_tokens
from nnmpi.doctor.diagnosis import diagnose
from nnmpi.errors import NnmpiError
from nnmpi.run import __main__ as run_command
from nnmpi.train.checkpoint_files import load_checkpoint
from nnmpi.train.cli import main, parse
from nnmpi.train.config import all_options
from nnmpi.train.metrics import cut_metrics
from nnmpi.train.run_state import RunState
from tests.harness.survival import WORDS, quick_trainings

LONGEST_S = 5.0
COMPILING_S = 60.0  # likewise, where numba may compile
HUGE = ("9" * 5000, "1e999", "-1e999", "NaN", "-Infinity", "18446744073709551616", "0", "-1", "4294967296")
TEXTS = ("", " ", "\0", "\x1b[31m", "é", "١", "🙂", "../..", "/dev/zero", "/dev/null", "None", "true", "[" * 3000, "{}")


# ---- damage ----


def flip(content: bytes, draws: Random) -> bytes:
    """Return it with one bit changed."""
    at = draws.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << draws.randrange(8)]) + content[at + 1 :]


def cut(content: bytes, draws: Random) -> bytes:
    """Return a beginning of it."""
    return content[: draws.randrange(len(content))]


def swap(content: bytes, draws: Random) -> bytes:
    """Return it with two pieces exchanged."""
    a, b, c, d = sorted(draws.randrange(len(content) + 1) for _ in range(4))
    return content[:a] + content[c:d] + content[b:c] + content[a:b] + content[d:]


def nest(content: bytes, draws: Random) -> bytes:
    """Return it with brackets within brackets somewhere, in the place of a value if there is one."""
    deep = draws.choice((2, 50, 20_000))
    return _put(content, draws, draws.choice((b"[" * deep + b"]" * deep, b'{"a":' * deep + b"1" + b"}" * deep)))


def inflate(content: bytes, draws: Random) -> bytes:
    """Return it with a huge or odd value somewhere, in the place of a number if there is one."""
    return _put(content, draws, draws.choice((*HUGE, *TEXTS)).encode())


def _put(content: bytes, draws: Random, value: bytes) -> bytes:
    """Put a value in the place of one that stands behind a colon, comma or blank, or anywhere."""
    places = [at for at, byte in enumerate(content) if byte in b":, ="]
    at = draws.choice(places) + 1 if places and draws.random() < 0.8 else draws.randrange(len(content))
    end = at
    while end < len(content) and content[end] not in b",}]\n ":
        end += 1
    return content[:at] + value + content[end:]


DAMAGES: dict[str, Callable[[bytes, Random], bytes]] = {
    "flipped": flip,
    "cut": cut,
    "swapped": swap,
    "nested": nest,
    "huge": inflate,
}


class Findings:
    """Counts how cases end, and keeps what must not happen."""

    def __init__(self) -> None:
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []

    def take(self, name: str, work: Callable[[], str], longest_s: float = LONGEST_S) -> None:
        """Do the work, which returns how it ended, or raises; tell what is wrong by a name."""
        begin_s = time.process_time()
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                end = work()
        except HelpAsked:
            end = "help"
        except NnmpiError as error:
            end = "refused"
            if "Traceback" in str(error) or len(str(error)) > 4000:
                self.wrong.append(f"{name}: {error}")
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            end = "TRACEBACK"
            self.wrong.append(f"{name}: {''.join(traceback.format_exception(error)[-6:])}")
        if (seconds := time.process_time() - begin_s) > longest_s:
            self.wrong.append(f"{name}: took {seconds:.1f} s")
        self.ends[end] += 1


# ---- a run ----


def make_run(folder: Path) -> list[str]:
    """Train into a folder, and return the hashes of the weights of its checkpoints."""
    with quick_trainings():
        simulate(partial(main, [*WORDS.split(), "--keep", "3", "--out", str(folder)]), 1)
    return [_weights(each) for each in sorted((folder / "checkpoints").glob("step-*"))]


def _weights(checkpoint: Path) -> str:
    return str(json.loads((checkpoint / "state.json").read_text())["files"]["model.safetensors"]["sha256"])


def files_of(run: Path) -> list[Path]:
    """Return the files that a program reads again, those of the newest checkpoint among them."""
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    names = ("config.json", "metrics.jsonl", "starts.jsonl", "finished.json", "times.json", "checkpoints/latest")
    return [*(run / name for name in names if (run / name).exists()), *sorted(newest.iterdir())]


def damage_run(run: Path, count: int, findings: Findings, seed: int = 0, trains: float = 0.01) -> None:
    """Damage each file of a run in each way, so many times, and use the run."""
    good = make_run(run)
    for file in files_of(run):
        whole = file.read_bytes()
        for damage, work in DAMAGES.items():
            draws = Random(f"{seed} {file.name} {damage}")
            for number in range(count):
                file.write_bytes(work(whole, draws))
                copy = run.with_name("copy")
                with_training = draws.random() < trains
                if with_training:
                    shutil.copytree(run, copy)
                findings.take(f"{file.name} {damage} {number}", partial(_use, run, good))
                if with_training:
                    findings.take(f"{file.name} {damage} {number}, resumed", partial(_resume, copy))
                    shutil.rmtree(copy)
        file.write_bytes(whole)


def _use(run: Path, good: list[str]) -> str:
    """Read what a run has left, as resuming, the doctor and programs do.

    Raises:
        NnmpiError: for what is refused.
    """
    diagnose(run)
    parse(["--resume", str(run)])
    metrics = (run / "metrics.jsonl").read_bytes()
    try:
        cut_metrics(run / "metrics.jsonl", 4)
    finally:
        (run / "metrics.jsonl").write_bytes(metrics)
    loaded = load_checkpoint(run / "checkpoints")
    assert loaded is not None
    checkpoint, place, _ = loaded
    RunState.from_json(checkpoint.state)
    for arrays in (checkpoint.model, checkpoint.optimizer):
        for name in arrays:
            arrays[name]
    assert _weights(place) in good, "weights that no checkpoint had"
    return "an older one" if place.name != sorted(run.glob("checkpoints/step-*"))[-1].name else "read"


def _resume(run: Path) -> str:
    with quick_trainings():
        simulate(partial(main, ["--resume", str(run), "--max-steps", "6", "--quiet"]), 1)
    return "resumed"


# ---- data ----


def make_data(folder: Path) -> dict[str, Path]:
    """Write a small data set of each kind; return what to load, by the file that is to be damaged."""
    draws = np.random.default_rng(0)
    x, y = draws.normal(size=(30, 4)).astype(np.float32), draws.integers(0, 3, 30)
    np.savez(folder / "plain.npz", x_train=x, y_train=y, x_test=x[:9], y_test=y[:9])
    np.savez_compressed(folder / "packed.npz", x=x, y=y)
    rows = [
        "a,b,c,d,kind",
        *(",".join(f"{each:.3f}" for each in row) + f",k{label}" for row, label in zip(x, y, strict=True)),
    ]
    (folder / "table.csv").write_text("\n".join(rows) + "\n")
    (folder / "table.csv.gz").write_bytes(gzip.compress("\n".join(rows).encode()))
    (folder / "text.txt").write_text("in the beginning was the word, and so on.\n" * 30)
    lines = [json.dumps({"text": f"the {number}th of all documents"}) for number in range(30)]
    (folder / "text.jsonl").write_text("\n".join(lines) + "\n")
    found = {
        name: folder / name
        for name in ("plain.npz", "packed.npz", "table.csv", "table.csv.gz", "text.txt", "text.jsonl")
    }
    idx, cifar = folder / "idx", folder / "cifar"
    idx.mkdir()
    for part, count in (("train", 20), ("t10k", 5)):
        image = struct.pack(">4i", 2051, count, 28, 28) + bytes(count * 784)
        (idx / f"{part}-images-idx3-ubyte").write_bytes(image)
        (idx / f"{part}-labels-idx1-ubyte").write_bytes(
            struct.pack(">2i", 2049, count) + bytes(range(count)).translate(bytes(each % 10 for each in range(256)))
        )
    cifar.mkdir()
    for name in ("data_batch_1.bin", "test_batch.bin"):
        (cifar / name).write_bytes(b"".join(bytes([number % 10]) + bytes(3072) for number in range(4)))
    found |= {f"idx/{name}": idx for name in ("train-images-idx3-ubyte", "t10k-labels-idx1-ubyte")}
    return found | {"cifar/data_batch_1.bin": cifar}


def damage_data(folder: Path, count: int, findings: Findings, seed: int = 0) -> None:
    """Damage data files of each kind, so many times in all ways together, and load them."""
    folder.mkdir(exist_ok=True)
    os.environ.setdefault("NNMPI_DATA", str(folder / "cache"))  # of tokens
    for name, given in make_data(folder).items():
        file, draws = folder / name, Random(f"{seed} {name}")
        whole = file.read_bytes()
        for number in range(count):
            damage = draws.choice(list(DAMAGES))
            file.write_bytes(DAMAGES[damage](whole, draws))
            findings.take(f"{name} {damage} {number}", partial(_load, given))
        file.write_bytes(whole)


def _load(given: Path) -> str:
    if given.suffix in (".txt", ".jsonl"):
        source = TextSource(given)
        prepare_tokens(source)
        load_text(source, 8)
    else:
        load(str(given))
    return "read"


# ---- command lines and configuration files ----


def draw_words(draws: Random) -> list[str]:
    """Return a command line: options as they are, with values that fit, nearly fit, or do not."""
    options, found = list(all_options().values()), []
    for option in draws.sample(options, draws.randint(0, 6)):
        flag = (
            option.flag
            if draws.random() < 0.95
            else draws.choice((option.flag[:-1], option.flag + "=", f"{option.flag}=3", option.flag[1:]))
        )
        found.append(flag)
        found += [draw_value(draws, option) for _ in range(draws.choice((0, 1, 1, 1, 1, 2)))]
    return (
        found
        if draws.random() < 0.95
        else [*found, draws.choice((*TEXTS, "-h=3", "--", "-", "--=", "---help", "--version=1"))]
    )


def draw_value(draws: Random, option: Any) -> str:
    """Return a word for an option."""
    shown = str(option.default)
    kind = draws.random()
    if kind < 0.4:
        return shown
    if kind < 0.6:
        return draws.choice(
            ("0", "1", "2", "3", "-1", "0.5", "1e-3", "1e308", "auto", "on", "off", "sgd", "ring", "mlp", "cnn")
        )
    if kind < 0.8:
        return draws.choice((*HUGE, *TEXTS))
    return flip(shown.encode() or b"x", draws).decode(errors="surrogateescape").replace("\0", "")


def draw_file(draws: Random) -> tuple[str, bytes]:
    """Return the name and content of a configuration file."""
    options = draws.sample(list(all_options().values()), draws.randint(0, 6))
    values = {
        option.name: draws.choice((option.default, draw_value(draws, option), 3, 0.5, [1], {"a": 1}, None, True))
        for option in options
    }
    if draws.random() < 0.5:
        content, name = json.dumps(values, default=str).encode(), "config.json"
    else:
        content = "".join(f"{key} = {json.dumps(value, default=str)}\n" for key, value in values.items()).encode()
        name = "config.toml"
    return name, draws.choice(list(DAMAGES.values()))(content, draws) if content and draws.random() < 0.5 else content


def try_words(folder: Path, count: int, findings: Findings, seed: int = 0) -> None:
    """Read so many command lines, every second one with a configuration file, and as many of the supervisor's."""
    folder.mkdir(exist_ok=True)
    draws = Random(seed)
    with _inside(folder):
        for number in range(count):
            words = draw_words(draws)
            if number % 2:
                name, content = draw_file(draws)
                Path(name).write_bytes(content)
                words += ["--config", name]
            findings.take(f"{number}: {words}", partial(_read, words))
            if number % 10 == 0:
                own = draws.sample(
                    ["-n", "2", "--restarts", "-3", "--hosts", ",,", "--start-limit", "nan", "x", "1"], 3
                )
                findings.take(f"{number}: run {own}", partial(_read_own, own))


def _read(words: list[str]) -> str:
    parse(words)
    return "read"


def _read_own(words: list[str]) -> str:
    run_command._read_own(words)
    return "read"


# ---- options that do not fit together ----

SAME = "--max-steps 3 --save-every 0 --eval-every 0 --quiet"
TEXT = "text.txt"
MODELS = {
    "mlp": "--dataset iris --hidden 7 5 9 --dtype float64",
    "cnn": "--dataset digits --hidden 9 --dtype float64",
    "lstm": f"--dataset {TEXT} --layers 2 --features 10 --context 6 --dtype float64",
    "resnet": "--dataset digits --dtype float64",  # batch normalization sees a rank's part
    "gpt": f"--dataset {TEXT} --layers 3 --features 12 --heads 3 --context 6 --dtype float64",
}
RESULT: dict[str, str] = {  # what the result hangs on
    "--batch-size": "1 2 7 13 32",
    "--optimizer": "sgd adam",
    "--clip": "0.1 10",
    "--dropout": "0.1",
    "--label-smoothing": "0.2",
    "--precision": "float32 bf16",
}
LAYOUT: dict[str, str] = {  # and what it must not hang on; some need others beside them
    "--jit": "on|off",
    "--activation-memory": "10KB|least|least --pp 2|100KB|300KB --offload .|3MB",
    "--offload-state": "optimizer --offload .|all --offload . --zero 3",
    "--zero": "1|2|3|1 --grad-accum 3|2 --bucket-mb 0.001 --overlap on|3 --bucket-mb 0.001",
    "--pp": "2|3|2 --pipeline naive|2 --pipeline gpipe --microbatches 3|2 --pipeline interleaved --virtual-stages 2"
    "|2 --pipeline zero-bubble --microbatches 5|3 --pipeline 1f1b --microbatches 7",
    "--microbatches": "1|3|5|7",
    "--grad-accum": "2|3|5",
    "--tp": "1|2|3",
    "--dp": "1|2|3",
    "--sp": "2|3|2 --sp-attention ring|3 --sp-attention ulysses",
    "--reduction": "fixed",
    "--overlap": "on|off",
    "--fused-update": "on|off",
    "--allreduce": "native|shared|ring|tree|ps|halving-doubling",
    "--bucket-mb": "0.001",
    "--sync": "bsp|bsp --servers 2|bsp --backup 1|asp|ssp --staleness 1|local --local-steps 2|gossip",
}
OTHERS = ("asp", "ssp", "local", "gossip", "--backup", "resnet")  # do not promise one rank's weights


def try_layouts(folder: Path, count: int, findings: Findings, seed: int = 0) -> None:
    """Train with so many mixtures of options on simulated ranks: equal to one rank's training, or refused."""
    alone: dict[str, Any] = {}
    folder.mkdir(exist_ok=True)
    (folder / TEXT).write_text("in the beginning was the word, and so on.\n" * 30)
    os.environ.setdefault("NNMPI_DATA", str(folder / "cache"))  # of tokens
    with _inside(folder):
        for number in range(seed, seed + count):
            draws = Random(number)
            ranks, model = draws.choice((1, 2, 2, 3, 4, 6)), draws.choice(list(MODELS))
            chosen = draws.sample(list(RESULT), draws.randint(0, 2))
            own = [word for name in chosen for word in (name, draws.choice(RESULT[name].split()))]
            names = draws.sample(list(LAYOUT), draws.choice((1, 2, 2, 3)))
            where = [word for name in names for word in (name, *draws.choice(LAYOUT[name].split("|")).split())]
            own = f"--model {model} {MODELS[model]}".split() + own
            if "--precision" in own:
                own.remove("--dtype"), own.remove("float64")
            key = " ".join(own)
            if key not in alone:
                alone[key] = _train_alone(own)
            work = partial(_equal, own + where, ranks, alone[key])
            findings.take(f"{number}: {ranks} ranks {' '.join(own + where)}", work, COMPILING_S)


def _train_alone(words: list[str]) -> dict[str, Any]:
    """Return the weights of one rank's training; none where it is refused."""
    with contextlib.suppress(NnmpiError):
        return _weights_after(words, 1)
    return {}


def _weights_after(words: list[str], ranks: int) -> dict[str, Any]:
    """Return the weights that a training ends with."""
    shutil.rmtree("run", ignore_errors=True)
    with quick_trainings(), contextlib.redirect_stdout(io.StringIO()):
        simulate(partial(main, [*SAME.split(), *words, "--out", "run"]), ranks)
    loaded = load_checkpoint(Path("run", "checkpoints"))
    assert loaded is not None
    return {name: np.array(loaded[0].model[name]) for name in loaded[0].model}


def _equal(words: list[str], ranks: int, alone: dict[str, Any]) -> str:
    found = _weights_after(words, ranks)
    assert found.keys() == alone.keys()
    if any(word in OTHERS for word in words):
        assert all(np.isfinite(array).all() for array in found.values())
        return "trained"
    rtol, atol = (2e-2, 2e-2) if "--precision" in words else (1e-6, 1e-9)
    for name, array in found.items():
        np.testing.assert_allclose(array, alone[name], rtol=rtol, atol=atol, err_msg=name)
    return "equal"


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


SUITES: dict[str, Callable[[Path, int, Findings], None]] = {
    "run": damage_run,
    "data": damage_data,
    "words": try_words,
    "layouts": try_layouts,
}

if __name__ == "__main__":
    begin_s, tried = time.monotonic(), Findings()
    with tempfile.TemporaryDirectory() as name:
        SUITES[sys.argv[1]](Path(name) / "it", int(sys.argv[2]), tried)
    for each in tried.wrong[:40]:
        print(each)
    print(f"{sum(tried.ends.values())} cases in {time.monotonic() - begin_s:.0f} s: {dict(tried.ends)}")
    sys.exit(bool(tried.wrong))
