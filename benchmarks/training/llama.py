"""A Llama beside transformers and PEFT: steps of all weights and of adapters, and tokens.

    python benchmarks/training/llama.py                                  # all tasks, 3 rounds
    python benchmarks/training/llama.py --tasks lora,decode --layers 4   # of a smaller model
    python benchmarks/training/llama.py --precision bf16                 # beside autocast
    python benchmarks/training/llama.py --peers-python VENV/bin/python   # has transformers, PEFT

SmolLM2-135M's shape with random weights, 2 x 256 tokens, AdamW, one thread:

    full        a training step of all weights
    lora        one of adapters of rank 16 for all linear layers
    decode      a greedy token after a prompt of 32, with the cache; --steps of them

Each contestant is a process of its own and has its turn in every round. Its time is processor time,
the median over all rounds; of `full` and `lora` after four steps that count for nothing. Memory is
the peak of the process less what it had before it made the model.
"""

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.training import turn  # noqa: E402

OURS, JIT, THEIRS, COMPILED = "nnmpi", "nnmpi, jit", "transformers", "torch.compile"
VOCABULARY, CONTEXT, FEATURES, HEADS, KV_HEADS, HIDDEN = 49152, 2048, 576, 9, 3, 1536
THETA, ROWS, TIME, PROMPT, RANK, LR = 100_000.0, 2, 256, 32, 16, 1e-4
FULL, LORA, DECODE = "full", "lora", "decode"
WARM_UP = 4
THEIR_MODULE = "transformers.models.llama.modeling_llama"


def draw() -> tuple[Any, Any]:
    """Return random texts and their next tokens, (ROWS, TIME) each."""
    import numpy as np

    text = np.random.default_rng(0).integers(0, VOCABULARY, (ROWS, TIME + 1))
    return text[:, :-1].copy(), text[:, 1:].copy()


def our_model(layers: int) -> Any:
    """Return nnmpi's model, not initialized."""
    from nnmpi import models

    return models.llama(
        VOCABULARY, CONTEXT, FEATURES, layers, HEADS, KV_HEADS, HIDDEN, theta=THETA, tied=True
    )


def our_step(task: str, jit: bool, precision: str, layers: int) -> Callable[[], float]:
    """Return a training step of nnmpi."""
    import nnmpi
    from nnmpi import nn, ops, optim

    x, y = draw()
    model = our_model(layers).initialize(seed=0)
    if task == LORA:
        nn.adapt(model, RANK, targets="all-linear").initialize(seed=0)
    optimizer = optim.AdamW(model.storage, lr=LR)

    @nnmpi.compile
    def step(x: Any, y: Any) -> Any:
        model.zero_grad()
        loss = ops.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    def run() -> float:
        with (
            nnmpi.jit(jit),
            nnmpi.use_precision(precision),
            nn.training(step=optimizer.steps),
        ):
            return float(step(x, y).item())

    return run


def their_step(task: str, compiled: bool, precision: str, layers: int) -> Callable[[], float]:
    """Return a training step of transformers, or of PEFT."""
    import torch

    model = their_model(layers).train()
    if task == LORA:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model, LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear")
        )
    trained = [item for item in model.parameters() if item.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR)
    forward = torch.compile(model) if compiled else model
    x, y = map(torch.from_numpy, draw())

    def run() -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            logits = forward(input_ids=x, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.reshape(y.numel(), -1), y.flatten())
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return run


def their_model(layers: int) -> Any:
    """Return transformers' model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            max_position_embeddings=CONTEXT,
            hidden_size=FEATURES,
            intermediate_size=HIDDEN,
            num_hidden_layers=layers,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": THETA},
        )
    )


def our_tokens(jit: bool, precision: str, layers: int) -> Iterator[int]:
    """Yield greedy tokens of nnmpi, one after another."""
    import numpy as np

    import nnmpi
    from nnmpi.backend.backend import numpy_backend
    from nnmpi.compose.inference import TokenGenerator, choose_token

    arranged = nnmpi.arrange(our_model(layers), nnmpi.start(), nnmpi.Layout())
    arranged.model.initialize(seed=0, storage=arranged.storage)
    generator = TokenGenerator(arranged, numpy_backend(), precision)
    prompt, random = draw()[0][0, :PROMPT].tolist(), np.random.default_rng(0)
    with nnmpi.jit(jit):
        yield from generator.write(
            prompt, CONTEXT, lambda logits: choose_token(logits, random, temperature=0)
        )


def their_generation(precision: str, layers: int) -> Callable[[int], object]:
    """Return a function that has transformers' `generate` write so many greedy tokens."""
    import torch

    model = their_model(layers).eval()
    prompt = torch.from_numpy(draw()[0][:1, :PROMPT])

    def write(tokens: int) -> object:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"), torch.no_grad():
            return model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
            )

    return write


def seconds_of(run: Callable[[], object]) -> float:
    """Return the processor time that a call takes."""
    begin = time.process_time()
    run()
    return time.process_time() - begin


def take(task: str, who: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of a contestant's steps or tokens, and its memory in MB."""
    precision, layers, steps, jit = options.precision, options.layers, options.steps, who == JIT
    before = resident_mb(who)
    if task == DECODE and who in (OURS, JIT):
        tokens = our_tokens(jit, precision, layers)
        for _ in range(WARM_UP):
            next(tokens)
        seconds = [seconds_of(lambda: next(tokens)) for _ in range(steps)]
    elif task == DECODE:
        write = their_generation(precision, layers)
        write(WARM_UP)
        few = seconds_of(lambda: write(WARM_UP))
        seconds = [(seconds_of(lambda: write(WARM_UP + steps)) - few) / steps]
    else:
        run = (
            our_step(task, jit, precision, layers)
            if who in (OURS, JIT)
            else their_step(task, who == COMPILED, precision, layers)
        )
        seconds = [seconds_of(run) for _ in range(WARM_UP + steps)][WARM_UP:]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return {"seconds": seconds, "peak_mb": peak - before}


def resident_mb(who: str) -> float:
    """Return the peak memory so far, with the libraries that a contestant needs."""
    modules = ("nnmpi.optim",) if who in (OURS, JIT) else ("torch", THEIR_MODULE)
    for name in modules:
        import_module(name)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


CONTESTANTS: Mapping[str, tuple[str, ...]] = {
    FULL: (OURS, JIT, THEIRS, COMPILED),
    LORA: (OURS, JIT, THEIRS, COMPILED),
    DECODE: (OURS, JIT, THEIRS),
}


def main() -> None:
    """Print a line for each task."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tasks", default=",".join(CONTESTANTS), help=f"of {', '.join(CONTESTANTS)} (all)"
    )
    parser.add_argument("--layers", type=int, default=30, metavar="N", help="blocks (30)")
    parser.add_argument("--without", default="", metavar="WHO", help="contestants to leave out")
    turn.add_options(parser)
    options = parser.parse_args()
    if options.take:
        task, who = options.take
        turn.tell(take(task, who, options), is_gloo=False)
        return
    left_out, words = options.without.split(";"), ["--layers", str(options.layers)]
    columns = ("task", "who", "ms", "its time / nnmpi's", "MB", "nnmpi's MB / its")
    print(f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", sep="\n")
    for task in options.tasks.split(","):
        field = [who for who in CONTESTANTS[task] if who not in left_out]
        taken: dict[str, list[dict[str, Any]]] = {who: [] for who in field}
        for _ in range(options.rounds):
            for who in field:
                is_ours = who in (OURS, JIT)
                one = turn.start(__file__, (task, who), is_ours, options, words=words)
                taken[who] += [] if one is None else [one]
        found = {who: turns for who, turns in taken.items() if turns}
        ms = {
            who: 1e3 * statistics.median(s for one in turns for s in one["seconds"])
            for who, turns in found.items()
        }
        peaks = {who: max(one["peak_mb"] for one in turns) for who, turns in found.items()}
        for who in found:
            ratios = f"{ms[who] / ms[OURS]:.2f}", f"{peaks[OURS] / peaks[who]:.2f}"
            cells = task, who, f"{ms[who]:.1f}", ratios[0], f"{peaks[who]:.0f}", ratios[1]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
