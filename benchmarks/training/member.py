"""One process of a contestant: `python benchmarks/training/member.py FOLDER CONTESTANT RANK`.

It connects to the benchmark's socket in the folder, and does what it is told there, line by line; between two lines it
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

from benchmarks.training.contestants import NAIVE, NNMPI, TORCH, Contestant  # noqa: E402
from benchmarks.training.memory import forget_peak, peak_bytes, resident_bytes  # noqa: E402
from benchmarks.training.player import Player  # noqa: E402

PLAYERS = {NNMPI: ("ours", "Ours"), TORCH: ("theirs", "Theirs"), NAIVE: ("naive", "Naive")}
REPEATS = 3  # of a step that is looked at: a compiled one is recorded in the first and replayed in the others
SOCKET = "socket"


def probe(player: Player, folder: Path, lr: float) -> dict[str, Any]:
    """Do one step from the first weights, several times over; write the weights that the last one leaves."""
    loss = 0.0
    for _ in range(REPEATS):
        _begin(player, folder, lr)
        loss = player.step()
    return {"loss": loss, "file": _end(player, folder)}


def train(player: Player, folder: Path, lr: float, steps: int) -> dict[str, Any]:
    """Do some steps from the first weights; write the weights that they leave."""
    _begin(player, folder, lr)
    for _ in range(steps):
        player.step()
    return {"file": _end(player, folder)}


def block(player: Player, lr: float, steps: int) -> dict[str, float]:
    """Return the seconds that so many steps took: the thread's, the process's, and the clock's."""
    player.lr, loss = lr, 0.0
    player.barrier()
    wall, process, cpu = time.perf_counter(), time.process_time(), time.thread_time()
    for _ in range(steps):
        loss = player.step()
    cpu, process, wall = time.thread_time() - cpu, time.process_time() - process, time.perf_counter() - wall
    return {"cpu_s": cpu, "process_s": process, "wall_s": wall, "loss": loss}


def memory() -> dict[str, int]:
    """Return resident bytes now and at their peak."""
    return {"peak_bytes": peak_bytes(), "resident_bytes": resident_bytes()}


def fresh() -> dict[str, int]:
    """Let the peak be counted from here on."""
    forget_peak()
    return memory()


def _begin(player: Player, folder: Path, lr: float) -> None:
    player.barrier()
    player.restore(folder / f"{'nnmpi' if player.contestant.side == NNMPI else 'torch'}.weights")
    player.lr = lr
    player.barrier()  # with the fused update the weights are the neighbours' as well


def _end(player: Player, folder: Path) -> str:
    player.barrier()
    file = folder / f"{player.contestant.name}-{player.contestant.ranks}-{player.rank}.left"
    player.save(file)
    return str(file)


def main(words: list[str]) -> None:
    """Do what is told, until the line ends."""
    folder, contestant = Path(words[0]), Contestant(**json.loads(words[1]))
    module, name = PLAYERS[contestant.side]
    make = getattr(import_module(f"benchmarks.training.{module}"), name)
    imported_bytes = resident_bytes()
    player: Player = make(contestant, int(words[2]) if words[2].isdecimal() else 0, folder)
    actions: Mapping[str, Callable[..., Any]] = {
        "probe": partial(probe, player, folder),
        "train": partial(train, player, folder),
        "block": partial(block, player),
        "memory": memory,
        "fresh": fresh,
    }
    with socket(AF_UNIX) as line:
        line.connect(str(folder / SOCKET))
        with line.makefile("rw") as talk:
            hello = {"name": contestant.name, "rank": player.rank, "imported_bytes": imported_bytes}
            _say(talk, {**hello, "facts": player.facts()})
            for told in talk:
                order = json.loads(told)
                _say(talk, actions[order.pop("do")](**order))
    player.close()


def _say(talk: Any, content: Mapping[str, Any]) -> None:
    talk.write(json.dumps(content) + "\n")
    talk.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
