"""What reading costs: an epoch's batches beside PyTorch's, and steps beside arrays in memory.

    python benchmarks/data/reading.py                          # all three parts
    python benchmarks/data/reading.py --check                  # small ones, one round
    python benchmarks/data/reading.py --peers-python PYTHON    # the one that has PyTorch

Pictures of 32 x 32 x 3 bytes, in batches of 64, scaled and normalized, in three parts:

    epoch    the batches of an epoch, from a warm cache: each way of nnmpi's, and what a user of
             PyTorch writes, with 2 workers
    warm     training steps with rows that are read, over those with arrays in memory, in CPU time
             of this process with all its threads, which other programs change little
    cold     the same with files whose pages were dropped, where a step computes for 5 ms

Contestants take turns; each turn of the first part is a process of its own. Shares are medians of
the rounds' ratios.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

# the checkout, so that the modules here have their full names
sys.path[0] = str(Path(__file__).resolve().parents[2])

BATCH, WORKERS, STEP_S = 64, 2, 0.005
PICTURES = "pictures"
FILES = ("memory", "npy", "h5", "packed.h5")
BLOCK = 256  # rows of --shuffle-block; a chunk has as many
PAIRS = {  # {a way of nnmpi's: PyTorch's}
    "npy": "torch npy",
    "h5": "torch h5",
    "packed.h5": "torch packed.h5",
    "packed.h5 in blocks": "torch packed.h5",
    PICTURES: f"torch {PICTURES}",
}


def write(folder: Path, count: int) -> None:
    """Write the same pictures in every form."""
    import h5py
    import numpy as np
    from PIL import Image

    draws = np.random.default_rng(0)
    # smooth, so that they pack as photographs do
    x = draws.integers(0, 256, (count, 8, 8, 3), dtype=np.uint8).repeat(4, 1).repeat(4, 2)
    y = np.arange(count) % 10
    np.savez(folder / "memory.npz", x=x, y=y)
    (folder / "npy").mkdir()
    np.save(folder / "npy" / "x.npy", x)
    np.save(folder / "npy" / "y.npy", y)
    with h5py.File(folder / "h5.h5", "w") as file:
        file["x"], file["y"] = x, y
    with h5py.File(folder / "packed.h5", "w") as file:
        file.create_dataset("x", data=x, chunks=(BLOCK, 32, 32, 3), compression="gzip")
        file["y"] = y
    for number in range(min(count, 6000)):
        place = folder / PICTURES / str(y[number]) / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(x[number]).save(place)


def load(folder: Path, name: str) -> Any:
    """Return a data set of one form, of all its samples."""
    import h5py
    import numpy as np

    from nnmpi import data

    if name == PICTURES:
        return data.load(folder / PICTURES)[0]
    if name == "memory":
        arrays = np.load(folder / "memory.npz")
    elif name == "npy":
        arrays = {item: np.load(folder / "npy" / f"{item}.npy", mmap_mode="r") for item in "xy"}
    else:
        arrays = h5py.File(folder / ("h5.h5" if name == "h5" else name), locking=False)
    return data.Dataset(name, arrays["x"], arrays["y"], 10, 1 / 255)


def our_epoch(folder: Path, who: str) -> Callable[[int], Iterator[Any]]:
    """Return a function of an epoch's number that yields its batches."""
    from nnmpi.data import Loader, Normalize

    name, _, order = who.partition(" ")
    loader = Loader(
        load(folder, name),
        BATCH,
        transform=Normalize(0.5, 0.25),
        shuffle_block=BLOCK if order else None,
    )

    def epoch(number: int) -> Iterator[Any]:
        for batch in loader.epoch(number):
            yield batch.x

    return epoch


def their_epoch(folder: Path, who: str) -> Callable[[int], Iterator[Any]]:
    """Return the same, of a data set as a user of PyTorch writes it."""
    import numpy as np
    import torch

    name = who.removeprefix("torch ")

    class Rows(torch.utils.data.Dataset):  # type: ignore[misc]
        def __init__(self) -> None:
            self.files, self.arrays = [], None
            if name == PICTURES:
                self.files = sorted((folder / PICTURES).glob("*/*.png"))

        def open(self) -> Any:
            import h5py

            if name == "npy":
                return {i: np.load(folder / "npy" / f"{i}.npy", mmap_mode="r") for i in "xy"}
            file = h5py.File(folder / ("h5.h5" if name == "h5" else name), "r")
            return {"x": file["x"], "y": file["y"][:]}

        def __len__(self) -> int:
            return len(self.files) if self.files else len(self.open()["y"])

        def __getitem__(self, i: int) -> Any:
            if self.files:
                from PIL import Image

                x, y = np.asarray(Image.open(self.files[i])), int(self.files[i].parent.name)
            else:
                if self.arrays is None:  # in each worker
                    self.arrays = self.open()
                x, y = np.asarray(self.arrays["x"][i]), int(self.arrays["y"][i])
            image = torch.from_numpy(x.copy()).permute(2, 0, 1).contiguous().float().div(255)
            return (image - 0.5) / 0.25, y

    loader = torch.utils.data.DataLoader(
        Rows(), BATCH, shuffle=True, num_workers=WORKERS, persistent_workers=True
    )
    return lambda number: (x for x, _ in loader)


def take(folder: Path, who: str) -> dict[str, Any]:
    """Read two epochs; return the samples per second of the second."""
    epoch = (their_epoch if who.startswith("torch") else our_epoch)(folder, who)
    count = sum(len(x) for x in epoch(0))
    begin = time.perf_counter()
    assert sum(len(x) for x in epoch(1)) == count
    return {"rate": count / (time.perf_counter() - begin)}


def start(folder: Path, who: str, peers: str) -> float | None:
    """Give a contestant its turn; None where its library is not installed."""
    python = peers if who.startswith("torch") else sys.executable
    command = [python, __file__, "--take", str(folder), who]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=env, capture_output=True, text=True)
    if ran.returncode == 0:
        return float(json.loads(ran.stdout.splitlines()[-1])["rate"])
    if "ModuleNotFoundError" not in ran.stderr:
        raise SystemExit(f"{who}:\n{ran.stderr}")
    return None


def epochs(folder: Path, rounds: int, peers: str) -> None:
    """Print the samples per second of each way, and its ratio over PyTorch's."""
    field = ["memory", *dict.fromkeys(PAIRS), *dict.fromkeys(PAIRS.values())]
    rates: dict[str, list[float | None]] = {who: [] for who in field}
    for _ in range(rounds):
        for who in field:
            rates[who].append(start(folder, who, peers))
    print(
        "| an epoch of | samples/s | PyTorch, 2 workers | times as fast |",
        "|---|---|---|---|",
        sep="\n",
    )
    for ours, theirs in {"memory": "", **PAIRS}.items():
        mine = [rate for rate in rates[ours] if rate]
        other = [rate for rate in rates.get(theirs, []) if rate]
        cells = ["-", "-"]
        if other:
            ratios = [a / b for a, b in zip(mine, other, strict=True)]
            cells = [f"{median(other):,.0f}", f"{median(ratios):.2f}"]
        print(f"| {' | '.join([ours, f'{median(mine):,.0f}', *cells])} |")


def steps(folder: Path, name: str, model: str) -> Callable[[int], float]:
    """Return a function that trains a number of steps and returns their seconds."""
    import nnmpi
    from nnmpi import models, optim
    from nnmpi.data import Loader, Normalize

    network = (
        models.mlp((32, 32, 3), 10, [128, 64]) if model == "mlp" else models.cnn((32, 32, 3), 10)
    )
    network.initialize(seed=0)
    worker = nnmpi.Worker(network, optim.Adam(network.storage, lr=1e-3), nnmpi.start())
    loader = Loader(load(folder, name), BATCH, transform=Normalize(0.5, 0.25))
    batches = (batch for number in range(10**6) for batch in loader.epoch(number))

    def block(count: int) -> float:
        begin = time.process_time()
        for _ in range(count):
            worker.step(next(batches))
        return time.process_time() - begin

    return block


def warm(folder: Path, rounds: int, count: int) -> None:
    """Print the speed of training steps on rows that are read, over those on arrays in memory."""
    from benchmarks.harness.turns import in_turns

    print("\n| warm | mlp | cnn |", "|---|---|---|", sep="\n")
    shares: dict[str, list[float]] = {name: [] for name in FILES[1:3]}
    for model in ("mlp", "cnn"):
        blocks = {name: steps(folder, name, model) for name in FILES[:3]}
        seconds: dict[str, list[float]] = {name: [] for name in blocks}
        for name, counts in in_turns([*blocks], rounds * 3, 2):
            passed = blocks[name](count if model == "mlp" else max(2, count // 4))
            if counts:
                seconds[name].append(passed)
        for name, found in shares.items():
            ratios = zip(seconds["memory"], seconds[name], strict=True)
            found.append(median(a / b for a, b in ratios))
    for name, found in shares.items():
        print(f"| {name} | {' | '.join(f'{share:.3f}' for share in found)} |")


def cold(folder: Path, rounds: int, count: int) -> None:
    """Print the speed of steps that compute for STEP_S on files whose pages were dropped."""
    import numpy as np

    from benchmarks.harness.turns import in_turns

    a = np.ones((256, 256), np.float32)

    def run(who: str) -> float:
        """Return the seconds of some steps; each has data set and loader of its own."""
        if who != "memory":
            file = folder / {"npy": "npy/x.npy", "h5": "h5.h5"}.get(who.split()[0], who.split()[0])
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        batches = our_epoch(folder, who)(0)
        next(batches)
        begin = time.perf_counter()
        for _ in range(count):
            next(batches)
            until = time.perf_counter() + STEP_S
            while time.perf_counter() < until:
                a @ a
        return time.perf_counter() - begin

    field = ["memory", "npy", "npy in blocks", "h5", "packed.h5 in blocks"]
    seconds: dict[str, list[float]] = {who: [] for who in field}
    for who, counts in in_turns(field, rounds, 1):
        passed = run(who)
        if counts:
            seconds[who].append(passed)
    print("\n| cold, steps of 5 ms | of arrays in memory |", "|---|---|", sep="\n")
    for who in field[1:]:
        ratios = zip(seconds["memory"], seconds[who], strict=True)
        print(f"| {who} | {median(a / b for a, b in ratios):.3f} |")


def main() -> None:
    """Print a table for each part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="reduced: seconds")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="turns (5)")
    parser.add_argument("--pictures", type=int, default=30_000, metavar="N", help="(30000)")
    parser.add_argument("--parts", default="epoch,warm,cold", help="with commas (all)")
    parser.add_argument(
        "--peers-python", default=sys.executable, help="the Python that has PyTorch (this one)"
    )
    parser.add_argument("--take", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.take:
        print(json.dumps(take(Path(options.take[0]), options.take[1])), flush=True)
        return
    rounds, pictures = (1, 2000) if options.check else (options.rounds, options.pictures)
    with tempfile.TemporaryDirectory(prefix="nnmpi-reading-") as text:
        folder = Path(text)
        write(folder, pictures)
        for part in options.parts.split(","):
            if part == "epoch":
                epochs(folder, rounds, options.peers_python)
            else:
                count = 8 if options.check else 100
                {"warm": warm, "cold": cold}[part](folder, rounds, count)


if __name__ == "__main__":
    main()
