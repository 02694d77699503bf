"""One process of a contestant: `python benchmarks/training/member.py FOLDER CONTESTANT RANK`.

It connects to the benchmark's socket in the folder, and does what it is asked to, line by line; between two lines it
sleeps. Under mpirun, RANK is "-" and MPI says which one it is.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from socket import AF_UNIX, socket
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2])  # the checkout, so that the modules here have their full names

from benchmarks.harness.memory import peak_bytes, reset_peak, resident_bytes  # noqa: E402
from benchmarks.training.contestants import NNMPI, TORCH, Contestant  # noqa: E402
from benchmarks.training.trainer import Trainer  # noqa: E402

TRAINERS = {
    NNMPI: ("trainer_nnmpi", "NnmpiTrainer"),
    TORCH: ("trainer_torch", "TorchTrainer"),
}
REPEATS = 3  # of nnmpi's step that is looked at: it is recorded in the first ones and replayed in the last
SOCKET = "socket"


def probe(trainer: Trainer, folder: Path, lr: float) -> dict[str, Any]:
    """Do one step from the first weights, nnmpi's several times over; write the weights that the last one leaves.

    Args:
        trainer: of this process.
        folder: where the first weights are, and the last go.
        lr: the learning rate.
    """
    loss = 0.0
    for _ in range(REPEATS if trainer.contestant.side == NNMPI else 1):
        _begin(trainer, folder, lr)
        loss = trainer.step()
    return {"loss": loss, "file": _end(trainer, folder)}


def train(trainer: Trainer, folder: Path, lr: float, steps: int) -> dict[str, Any]:
    """Do some steps from the first weights; write the weights that they leave.

    Args:
        trainer: of this process.
        folder: where the first weights are, and the last go.
        lr: the learning rate.
        steps: how many.
    """
    _begin(trainer, folder, lr)
    for _ in range(steps):
        trainer.step()
    return {"file": _end(trainer, folder)}


def block(trainer: Trainer, lr: float, steps: int) -> dict[str, float]:
    """Return the seconds that so many steps took: the thread's, the process's, and the clock's.

    Args:
        trainer: of this process.
        lr: the learning rate.
        steps: how many.
    """
    trainer.lr, loss = lr, 0.0
    trainer.barrier()
    wall, process, cpu = time.perf_counter(), time.process_time(), time.thread_time()
    for _ in range(steps):
        loss = trainer.step()
    cpu, process, wall = time.thread_time() - cpu, time.process_time() - process, time.perf_counter() - wall
    return {"cpu_s": cpu, "process_s": process, "wall_s": wall, "loss": loss}


def memory() -> dict[str, int]:
    """Return resident bytes now and at their peak."""
    return {"peak_bytes": peak_bytes(), "resident_bytes": resident_bytes()}


def fresh() -> dict[str, int]:
    """Let the peak be counted from here on."""
    reset_peak()
    return memory()


def _begin(trainer: Trainer, folder: Path, lr: float) -> None:
    trainer.barrier()
    trainer.restore(folder / f"{'nnmpi' if trainer.contestant.side == NNMPI else 'torch'}.weights")
    trainer.lr = lr
    trainer.barrier()  # with the fused update the weights are the neighbours' as well


def _end(trainer: Trainer, folder: Path) -> str:
    trainer.barrier()
    file = folder / f"{trainer.contestant.name}-{trainer.contestant.ranks}-{trainer.rank}.left"
    trainer.save(file)
    return str(file)


def main(words: list[str]) -> None:
    """Do what is asked for, until the connection ends."""
    folder, contestant = Path(words[0]), Contestant(**json.loads(words[1]))
    module, name = TRAINERS[contestant.side]
    make = getattr(import_module(f"benchmarks.training.{module}"), name)
    imported_bytes = resident_bytes()
    trainer: Trainer = make(contestant, int(words[2]) if words[2].isdecimal() else 0, folder)
    actions: Mapping[str, Callable[..., Any]] = {
        "probe": partial(probe, trainer, folder),
        "train": partial(train, trainer, folder),
        "block": partial(block, trainer),
        "memory": memory,
        "fresh": fresh,
    }
    with socket(AF_UNIX) as connection:
        connection.connect(str(folder / SOCKET))
        with connection.makefile("rw") as talk:
            hello = {"name": contestant.name, "rank": trainer.rank, "imported_bytes": imported_bytes}
            _say(talk, {**hello, "facts": trainer.facts()})
            for line in talk:
                order = json.loads(line)
                _say(talk, actions[order.pop("do")](**order))
    trainer.close()


def _say(talk: Any, content: Mapping[str, Any]) -> None:
    talk.write(json.dumps(content) + "\n")
    talk.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
