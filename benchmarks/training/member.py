"""One process of a contestant: `python benchmarks/training/member.py FOLDER CONTESTANT RANK`.

It connects to the benchmark's socket in the folder, and executes one order per line; between two
lines it sleeps. Under mpirun, RANK is "-", and MPI gives the rank.
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
# of nnmpi's judged step: the first ones are recorded, the last is a replay
REPEATS = 3
SOCKET = "socket"


class Trainer(ABC):
    """One rank of a contestant: a step, and its parameters as arrays. Construction is collective
    over its ranks.

    The benchmark calls its public methods by name.

    Attributes:
        case, contestant: the model and the way to run it.
        rank: of this process.
        lr: the learning rate of the next step.
    """

    def __init__(self, contestant: Contestant, rank: int, folder: Path) -> None:
        self.contestant, self.rank, self.lr, self.folder = contestant, rank, 0.0, folder
        self.case: Case = CASES[contestant.case]

    @abstractmethod
    def one_step(self) -> float:
        """Do forward, backward, exchange and update. Return a loss whose mean over the ranks is the
        global one.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Wait for all ranks."""

    @abstractmethod
    def arrays(self) -> list[NDArray[np.floating]]:
        """Return views of the parameters in order of definition, in the side's own layout."""

    @abstractmethod
    def facts(self) -> dict[str, str]:
        """Return the libraries that compute, by name."""

    @abstractmethod
    def close(self) -> None:
        """Release collective resources."""

    def load(self) -> list[NDArray[Any]]:
        """Return this rank's part of the global batch; floating point in the contestant's dtype."""
        rows, dtype = self.case.batch // self.contestant.ranks, self.contestant.dtype
        part = slice(self.rank * rows, (self.rank + 1) * rows)
        both = (np.load(self.folder / f"{name}.npy", mmap_mode="r")[part] for name in ("x", "y"))
        return [np.array(item, dtype if item.dtype.kind == "f" else item.dtype) for item in both]

    def probe(self, lr: float) -> dict[str, Any]:
        """Do one step from the first weights, nnmpi's REPEATS times; write the final weights."""
        for _ in range(REPEATS if self.contestant.side == NNMPI else 1):
            result = self.train(lr, 1)
        return result

    def train(self, lr: float, steps: int) -> dict[str, Any]:
        """Do steps from the first weights; write the final weights, one array after another."""
        self.barrier()
        with open(self.folder / f"{self.contestant.side}.weights", "rb") as values:
            for array in self.arrays():
                array[...] = np.fromfile(values, np.float32, array.size).reshape(array.shape)
        self.lr, loss = lr, 0.0
        self.barrier()  # with the fused update, ranks on a node share the weights
        for _ in range(steps):
            loss = self.one_step()
        self.barrier()
        file = self.folder / f"{self.contestant.name}-{self.contestant.ranks}-{self.rank}.left"
        with open(file, "wb") as left:
            for array in self.arrays():
                array.tofile(left)
        return {"loss": loss, "file": str(file)}

    def block(self, lr: float, steps: int) -> dict[str, float]:
        """Return the seconds of `steps` steps: CPU time of the thread, and wall clock."""
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
        """Return the peak of resident bytes since the last call."""
        peak = peak_bytes()
        reset_peak()
        return peak


def main(words: list[str]) -> None:
    """Execute orders until the connection ends."""
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
