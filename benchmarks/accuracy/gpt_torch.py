"""Repeats a run of `nnmpi.train --model gpt` in PyTorch, for a comparison of the losses.

    python benchmarks/accuracy/gpt_torch.py runs/shakespeare-0 --out runs/shakespeare-torch-0

The recipe is the run's, from its config.json: the same tokens in the same batches in the same
order, the same first weights (transformers reads them from nnmpi's files), the same learning rates
of AdamW, the same clipping. The network is transformers' GPT2LMHeadModel with its default
attention. The run folder gets a `config.json`, and a `metrics.jsonl` with the lines "train" and
"test" of `nnmpi.train`, so that `collect.py` reads both.
"""

import argparse
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import GPT2LMHeadModel

from nnmpi.comm.mesh import Mesh
from nnmpi.comm.mpi.start import start
from nnmpi.data.dataset import IGNORED
from nnmpi.data.loader import Batch, Loader
from nnmpi.models.pretrained import save_pretrained
from nnmpi.train.build import build_extent, build_model, build_schedule
from nnmpi.train.config import Config, assemble, flatten
from nnmpi.train.derived import dropout_of, size_of
from nnmpi.train.folder import read_run
from nnmpi.train.inputs import Inputs, load_inputs

LOG_EVERY = 10


def twin(config: Config, inputs: Inputs) -> torch.nn.Module:
    """Return PyTorch's model with the run's first weights."""
    model = build_model(config.model, inputs.train.sample_shape, inputs.train.classes)
    model.initialize(seed=config.run.seed)
    with TemporaryDirectory() as folder:
        size = size_of(config.model, inputs.train.classes, inputs.train.sample_shape[0])
        save_pretrained(Path(folder), model.state(), size)
        return GPT2LMHeadModel.from_pretrained(
            folder, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
        )


def summed_loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss summed over a batch's tokens."""
    logits = model(torch.from_numpy(batch.x)).logits.flatten(0, 1)
    y = torch.from_numpy(batch.y).flatten()
    return torch.nn.functional.cross_entropy(logits, y, ignore_index=IGNORED, reduction="sum")


def evaluate(model: torch.nn.Module, loader: Loader) -> float:
    """Return the mean loss per token of the test data."""
    total, targets = 0.0, 0
    with torch.no_grad():
        for batch in loader.epoch(0):
            total += summed_loss(model, batch).item()
            targets += batch.global_targets
    return total / targets


def main() -> None:
    """Train, print a line every LOG_EVERY steps, and write the metrics to the run folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder of the run to repeat")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="run folder, made if it is missing")
    arguments = parser.parse_args()
    config = assemble(read_run(arguments.run, str(arguments.run)))
    recipe = config.optimization
    if (
        config.model.model,
        recipe.optimizer,
        dropout_of(config.model),
        config.parallel.microbatches,
    ) != (
        "gpt",
        "adamw",
        0.0,
        None,
    ):
        raise SystemExit(
            f"{arguments.run} is no run of gpt with adamw, and without dropout and --microbatches"
        )
    torch.set_num_threads(arguments.threads)
    inputs = load_inputs(config, start(), print, Mesh())
    extent = build_extent(recipe, inputs)
    rate = build_schedule(recipe, extent)
    model = twin(config, inputs)
    decay = 0.01 if recipe.weight_decay is None else recipe.weight_decay
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, weight_decay=decay)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "config.json").write_text(
        json.dumps(flatten(config) | {"threads": arguments.threads}) + "\n"
    )
    begin, step, window = time.perf_counter(), 0, 0.0
    with (arguments.out / "metrics.jsonl").open("w", buffering=1) as file:
        while step < extent.steps:
            for batch in inputs.train_loader.epoch(step // extent.train_batches):
                optimizer.param_groups[0]["lr"] = rate(step)
                optimizer.zero_grad()
                loss = summed_loss(model, batch) / batch.global_targets
                torch.autograd.backward(loss)
                if config.numerics.clip is not None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), config.numerics.clip)
                optimizer.step()
                step, window = step + 1, window + loss.item()
                if step % LOG_EVERY == 0:
                    seconds = time.perf_counter() - begin
                    line = {
                        "kind": "train",
                        "global_step": step,
                        "loss": window / LOG_EVERY,
                        "elapsed_s": seconds,
                    }
                    file.write(json.dumps(line) + "\n")
                    print(
                        f"step {step}/{extent.steps}: loss {window / LOG_EVERY:.4f},"
                        f" {seconds:.0f} s",
                        flush=True,
                    )
                    window = 0.0
                if step == extent.steps:
                    break
        loss = evaluate(model, inputs.test_loader)
        file.write(json.dumps({"kind": "test", "global_step": step, "loss": loss}) + "\n")
    print(f"test loss {loss:.4f}")


if __name__ == "__main__":
    main()
