"""`python benchmarks/accuracy --check`: each program of the suite, reduced; PyTorch's where it is
installed.

The measurements are the programs' own; see README.md.
"""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path[0] = str(Path(__file__).resolve().parents[2])  # the checkout

import numpy as np  # noqa: E402

from benchmarks.harness.command import Parser, run  # noqa: E402

FOLDER = "benchmarks/accuracy"
TRAIN = "-m nnmpi.train --eval-every 0 --max-steps 2"


def write_images(folder: Path) -> None:
    """Write MNIST's four files, with few images."""
    folder.mkdir()
    for part, count in (("train", 64), ("t10k", 16)):
        for kind, shape in (("images", (count, 28, 28)), ("labels", (count,))):
            head = np.array([2048 + len(shape), *shape], ">i4").tobytes()
            values = np.arange(np.prod(shape)) % (10 if kind == "labels" else 251)
            name = f"{part}-{kind}-idx{len(shape)}-ubyte"
            (folder / name).write_bytes(head + values.astype(np.uint8).tobytes())


def main() -> None:
    """Run the programs one after the other; the first that fails ends it."""
    parser = Parser("python benchmarks/accuracy", description=__doc__)
    parser.add_argument("--check", action="store_true", required=True, help="see above")
    parser.parse_args()
    with TemporaryDirectory() as name:
        folder = Path(name)
        programs = [
            f"{FOLDER}/iris.py --seeds 1 --recipes plain",
            f"{TRAIN} --dataset iris --model mlp --out {folder}/iris",
            f"{FOLDER}/collect.py {folder}/iris.json {folder}/iris",
        ]
        if find_spec("torch"):
            write_images(folder / "mnist")
            programs.append(
                f"{FOLDER}/mnist_torch.py --data-dir {folder}/mnist --epochs 1 --out {folder}/torch"
            )
        if find_spec("transformers"):
            gpt = "--dataset paradise-lost --model gpt --layers 1 --optimizer adamw --dropout 0"
            programs += [
                f"{TRAIN} {gpt} --out {folder}/gpt",
                f"{FOLDER}/gpt_torch.py {folder}/gpt --out {folder}/gpt-torch",
            ]
        for words in programs:
            subprocess.run([sys.executable, *words.split()], check=True, cwd=sys.path[0])


if __name__ == "__main__":
    sys.exit(run("python benchmarks/accuracy", main))
