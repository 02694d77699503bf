"""Trainings that are started again after faults, in the simulated world: what must hold of each, whatever the seed.

    python -m tests.harness.survival 0 10000        # seeds 0 to 9999; tells the first that fails, and how many it took

A seed draws how many ranks each start has, and what goes wrong in it: a rank that is killed or stops in some call, a
kill in the middle of some operation of the disk, with or without what was not synced, a disk that fills up; slow ranks
and late messages besides. The last start has no fault. Then

    each start ends with an error that has a name, or well
    no checkpoint is lost that was written
    the run ends with the bits of one that nothing happened to
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random

import pytest

from nnmpi.comm.simulated.faults import Faults
from nnmpi.comm.simulated.world import simulate
from nnmpi.errors import CheckpointError, NnmpiError
from nnmpi.train import checkpoint_files
from nnmpi.train.cli import main
from nnmpi.train.metrics import read_metrics
from tests.harness.disk import FaultyDisk

WORDS = (
    "--model mlp --hidden 3 --dataset iris --batch-size 60 --max-steps 6 --save-steps 2 --save-every 0 --eval-every 0"
)
WORDS += " --reduction fixed --schedule constant --log-every 1 --keep 2 --quiet --backend numpy"
MOST_RANKS, MOST_FAULTS = 3, 3
CALLS, OPERATIONS = 400, 150  # about as many as such a run has
EXPECTED_ERRORS = ("was killed", "has stopped", "No space left on device")


@contextmanager
def quick_trainings() -> Iterator[None]:
    """Leave out what takes longer than such a small run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nnmpi.train.metrics.can_write", lambda: False)
        yield


def undisturbed(folder: Path) -> list[bytes]:
    """Return the arrays that a run ends with to which nothing happens."""
    simulate(partial(main, [*WORDS.split(), "--out", str(folder)]), 2)
    return arrays_of(folder)


def arrays_of(run: Path) -> list[bytes]:
    """Return the arrays of a run's last checkpoint."""
    last = run / "checkpoints" / (run / "checkpoints" / "latest").read_text().strip()
    return [file.read_bytes() for file in sorted(last.glob("*.safetensors"))]


def survive(seed: int, run: Path, wanted: list[bytes]) -> str:
    """Let a run go through what a seed draws.

    Args:
        seed: of all that happens.
        run: a new folder for it.
        wanted: see `undisturbed`.

    Returns:
        What was wrong; nothing if all was well.
    """
    draws, promised = Random(seed), _Promised()
    with promised.watched():
        for left in reversed(range(draws.randint(1, MOST_FAULTS) + 1)):
            try:
                _start(draws, run, faulty=left > 0)
            except NnmpiError as error:
                named = any(each in str(error) for each in EXPECTED_ERRORS) and "Traceback" not in str(error)
                if left == 0 or not named:
                    return f"start with {left} faults to come: {type(error).__name__}: {error}"
            except Exception as error:
                return f"start with {left} faults to come: {type(error).__name__}: {error}"
            if lost := promised.find_lost(run):
                return lost
    return _judge_end(run, wanted)


def _start(draws: Random, run: Path, faulty: bool) -> None:
    """Start the run, or go on with it, and let something go wrong.

    Raises:
        NnmpiError: what it ended with.
    """
    ranks = draws.randint(1, MOST_RANKS)
    fault = draws.choice(("ranks", "kill", "power", "full")) if faulty else "none"
    faults = Faults.drawn(draws.randrange(2**32), ranks, CALLS) if fault == "ranks" else None
    at = draws.randint(1, OPERATIONS)
    disk = FaultyDisk(run, draws, at if fault in ("kill", "power") else 0, at if fault == "full" else 0)
    words = ["--resume", str(run)] if (run / "config.json").exists() else ["--out", str(run)]
    try:
        with disk:
            program = partial(main, [*WORDS.split(), *words])
            simulate(program, ranks, seed=draws.randrange(2**32), check=False, faults=faults)
    finally:
        if fault == "power":
            disk.lose()


class _Promised:
    """The newest checkpoint of which the program was told that it is safe."""

    def __init__(self) -> None:
        self.step = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note each checkpoint that is finished."""
        finish = checkpoint_files.CheckpointWriter.finish

        def noting(writer: checkpoint_files.CheckpointWriter, *args: object) -> str:
            name = finish(writer, *args)  # type: ignore[arg-type]
            self.step = int(name.rpartition("-")[2])
            return name

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint_files.CheckpointWriter, "finish", noting)
            yield

    def find_lost(self, run: Path) -> str:
        """Return what has become of it, if it is gone."""
        try:
            loaded = checkpoint_files.load_checkpoint(run / "checkpoints")
        except CheckpointError as error:
            return f"a checkpoint of step {self.step} was written: {error}" if self.step else ""
        step = 0 if loaded is None else loaded[0].state["step"]
        return f"the checkpoint of step {self.step} was written, and that of step {step} is left" * (step < self.step)


def _judge_end(run: Path, wanted: list[bytes]) -> str:
    """Return what is wrong with a run that has ended."""
    try:
        records = read_metrics(run / "metrics.jsonl")
    except ValueError as error:
        return f"metrics that are none: {error}"
    trained = [each["global_step"] for each in records if each["kind"] == "train"]
    if trained != list(range(1, 7)):
        return f"metrics of the steps {trained}"
    if json.loads((run / "finished.json").read_text())["step"] != 6:
        return "finished.json is of another step"
    return "" if arrays_of(run) == wanted else "the run ends with other bits"


def sweep(first: int, last: int, folder: Path) -> tuple[int, str] | None:
    """Return the first seed of a range that fails, and how; None where all is well."""
    with quick_trainings():
        wanted = undisturbed(folder / "undisturbed")
        for seed in range(first, last):
            if wrong := survive(seed, folder / f"run-{seed}", wanted):
                return seed, wrong
    return None


if __name__ == "__main__":
    begin, (low, high) = time.monotonic(), map(int, sys.argv[1:3])
    with tempfile.TemporaryDirectory() as name:
        failed = sweep(low, high, Path(name))
    if failed is not None:
        sys.exit(f"seed {failed[0]}: {failed[1]}")
    print(f"seeds {low} to {high - 1}: all ended well, in {time.monotonic() - begin:.0f} s")
