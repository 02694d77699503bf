"""Tokens per second of a GPT that writes with its cache, beside transformers: `python benchmarks/training/writing.py`.

Both have the same random weights, one sequence and one thread, and take turns. Tokens are the likeliest ones, which
must be the same, and then drawn from all. Seconds are CPU time of the thread. Needs torch and transformers.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median

sys.path[0] = str(Path(__file__).resolve().parents[2])  # the checkout, so that the modules here have their full names

from benchmarks.training.environment import clean  # noqa: E402

clean(os.environ)  # must come before NumPy is loaded

import numpy as np  # noqa: E402
import torch  # noqa: E402
from transformers import GPT2Config, GPT2LMHeadModel  # noqa: E402

from benchmarks.training.cases import find  # noqa: E402
from benchmarks.training.trainer_nnmpi import build  # noqa: E402
from nnmpi.backend import keep_freed_memory  # noqa: E402
from nnmpi.backend.device import select  # noqa: E402
from nnmpi.comm.group import Group  # noqa: E402
from nnmpi.comm.simulated.simulated_world import simulate  # noqa: E402
from nnmpi.compose.arrange import arrange  # noqa: E402
from nnmpi.compose.generation import TokenGenerator, choose_token, generate  # noqa: E402
from nnmpi.compose.layout import Layout  # noqa: E402

PROMPT = 16
Way = Callable[[float], list[int]]


def nnmpis_way(name: str, tokens: int, group: Group) -> tuple[Way, list[np.ndarray]]:
    """Return what writes so many tokens at a temperature, and the weights."""
    case, backend = find(name), select("numpy")
    where = arrange(build(case), group, Layout(), np.zeros((1, 1), np.int64), "float32", backend)
    where.model.initialize(seed=0, dtype="float32", backend=backend)
    generator = TokenGenerator(where, backend, case.classes)

    def way(temperature: float) -> list[int]:
        choose = partial(choose_token, draw=np.random.default_rng(0), temperature=temperature)
        return list(islice(generate(generator, range(PROMPT), case.sizes[4], choose), tokens))

    return way, [parameter.data for parameter in where.model.parameters()]


def transformers_way(name: str, tokens: int, weights: list[np.ndarray]) -> Way:
    """Return the same by transformers, with these weights, which stand in the same order and layout there."""
    _, features, heads, layers, context, vocabulary = find(name).sizes
    size = {"n_embd": features, "n_head": heads, "n_layer": layers, "n_positions": context, "vocab_size": vocabulary}
    model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0)).eval()
    for parameter, array in zip(model.transformer.parameters(), weights, strict=True):
        parameter.data.copy_(torch.from_numpy(np.array(array)))
    prompt = torch.arange(PROMPT)[None]

    def way(temperature: float) -> list[int]:
        how = {"do_sample": True, "top_k": 0} if temperature else {"do_sample": False}
        count = {"max_new_tokens": tokens, "min_new_tokens": tokens, "pad_token_id": 0}
        with torch.no_grad():
            found = model.generate(prompt, attention_mask=torch.ones_like(prompt), **count, **how)
        return list(map(int, found[0, PROMPT:]))

    return way


def compare(name: str, tokens: int, rounds: int, group: Group) -> None:
    """Print tokens per second of both, and the median of the rounds' ratios."""
    ours, weights = nnmpis_way(name, tokens, group)
    ways = [ours, transformers_way(name, tokens, weights)]
    for temperature in (0.0, 1.0):
        wrote = [way(temperature) for way in ways]  # warms up
        assert temperature or wrote[0] == wrote[1], "they wrote different tokens"
        taken: list[list[float]] = []
        for _ in range(rounds):
            taken.append([])
            for way in ways:
                begin = time.thread_time()
                way(temperature)
                taken[-1].append(time.thread_time() - begin)
        speeds = [tokens / median(each) for each in zip(*taken, strict=True)]
        ratio = median(theirs / mine for mine, theirs in taken)
        print(
            f"{name}, temperature {temperature:g}: nnmpi {speeds[0]:.1f}, transformers {speeds[1]:.1f} tokens per "
            f"second; ratio {ratio:.2f}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=("gpt-small", "gpt2"), default=["gpt-small", "gpt2"])
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    for case_name in options.cases:
        simulate(partial(compare, case_name, options.tokens, options.rounds), 1)
