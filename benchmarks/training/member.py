"""One process of a contestant: `python benchmarks/training/member.py FOLDER CONTESTANT RANK`.

It connects to the benchmark's socket in the folder, and does what it is asked to, line by line;
between two lines it sleeps. Under mpirun, RANK is "-" and MPI says which one it is.
"""

import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from socket import AF_UNIX, socket
from typing import Any

# the checkout, so that the modules here have their full names
sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np  # noqa: E402
from numpy.typing import NDArray  # noqa: E402

from benchmarks.harness.memory import peak_bytes, reset_peak  # noqa: E402
from benchmarks.training.cases import CASES, Case  # noqa: E402
from benchmarks.training.contestants import NNMPI, TORCH, Contestant  # noqa: E402

TRAINERS = {NNMPI: "NnmpiTrainer", TORCH: "TorchTrainer"}
# of nnmpi's step that is looked at: it is recorded in the first ones and replayed in the last
REPEATS = 3
SOCKET = "socket"


class Trainer(ABC):
    """One rank of a contestant: a step, and its parameters as arrays. Making one is collective over
    its ranks.

    Its public methods are what the benchmark asks for.

    Attributes:
        case, contestant: what it runs.
        rank: its own.
        lr: the learning rate of the next step.
    """

    def __init__(self, contestant: Contestant, rank: int, folder: Path) -> None:
        self.contestant, self.rank, self.lr, self.folder = contestant, rank, 0.0, folder
        self.case: Case = CASES[contestant.case]

    @abstractmethod
    def one_step(self) -> float:
        """Do forward, backward, exchange and update. Return the loss; its mean over the ranks is
        the global one.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Return when all ranks have come here."""

    @abstractmethod
    def arrays(self) -> list[NDArray[np.floating]]:
        """Return views of the parameters in order of definition, in the side's own layout."""

    @abstractmethod
    def facts(self) -> dict[str, str]:
        """Return what computes here, by name."""

    @abstractmethod
    def close(self) -> None:
        """Take apart what was made collectively."""

    def load(self) -> list[NDArray[Any]]:
        """Return this rank's part of the global batch, in the contestant's dtype where it is
        floating point.
        """
        rows, dtype = self.case.batch // self.contestant.ranks, self.contestant.dtype
        part = slice(self.rank * rows, (self.rank + 1) * rows)
        both = (np.load(self.folder / f"{name}.npy", mmap_mode="r")[part] for name in ("x", "y"))
        return [np.array(item, dtype if item.dtype.kind == "f" else item.dtype) for item in both]

    def probe(self, lr: float) -> dict[str, Any]:
        """Do one step from the first weights, nnmpi's several times over; write the weights that it
        leaves.
        """
        for _ in range(REPEATS if self.contestant.side == NNMPI else 1):
            result = self.train(lr, 1)
        return result

    def train(self, lr: float, steps: int) -> dict[str, Any]:
        """Do some steps from the first weights; write the weights that they leave, one array after
        another.
        """
        self.barrier()
        with open(self.folder / f"{self.contestant.side}.weights", "rb") as values:
            for array in self.arrays():
                array[...] = np.fromfile(values, np.float32, array.size).reshape(array.shape)
        self.lr, loss = lr, 0.0
        self.barrier()  # with the fused update the weights are the neighbours' as well
        for _ in range(steps):
            loss = self.one_step()
        self.barrier()
        file = self.folder / f"{self.contestant.name}-{self.contestant.ranks}-{self.rank}.left"
        with open(file, "wb") as left:
            for array in self.arrays():
                array.tofile(left)
        return {"loss": loss, "file": str(file)}

    def block(self, lr: float, steps: int) -> dict[str, float]:
        """Return the seconds that so many steps took: the thread's, and the clock's."""
        self.lr, loss = lr, 0.0
        self.barrier()
        wall, cpu = time.perf_counter(), time.thread_time()
        for _ in range(steps):
            loss = self.one_step()
        return {
            "cpu_s": time.thread_time() - cpu,
            "wall_s": time.perf_counter() - wall,
            "loss": loss,
        }

    def memory(self) -> int:
        """Return the resident bytes at their peak since this was asked last."""
        peak = peak_bytes()
        reset_peak()
        return peak


def main(words: list[str]) -> None:
    """Do what is asked for, until the connection ends."""
    folder, contestant = Path(words[0]), Contestant(**json.loads(words[1]))
    make = getattr(
        import_module(f"benchmarks.training.trainer_{contestant.side}"), TRAINERS[contestant.side]
    )
    trainer = make(contestant, int(words[2]) if words[2].isdecimal() else 0, folder)
    with socket(AF_UNIX) as connection:
        connection.connect(str(folder / SOCKET))
        with connection.makefile("rw") as talk:
            _say(talk, {"name": contestant.name, "rank": trainer.rank, "facts": trainer.facts()})
            for line in talk:
                order = json.loads(line)
                _say(talk, getattr(trainer, order.pop("do"))(**order))
    trainer.close()


def _say(talk: Any, content: Mapping[str, Any] | int) -> None:
    talk.write(json.dumps(content) + "\n")
    talk.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
