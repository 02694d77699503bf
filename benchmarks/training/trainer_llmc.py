"""llm.c (github.com/karpathy/llm.c): GPT-2 in C, its own forward and backward, from sources that the user has.

They are compiled into a library with the options of its Makefile. Its threads share the matrices' loops out by OpenMP:
what are ranks elsewhere are threads here. The update is plain SGD as everybody's, which costs less than its AdamW.
"""

from __future__ import annotations

import ctypes
import math
import subprocess
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.training.cases import Case
from benchmarks.training.contestants import Contestant
from benchmarks.training.trainer import Trainer

COMPILER = ("gcc", "-Ofast", "-march=native", "-fopenmp", "-shared", "-fPIC", "-w", "-x", "c", "-")
ROWS = 128  # it pads its table of tokens to a multiple of these
LAYERS = slice(2, 14)  # of its 16 parameters, those that it has for all layers in one array
CALLS = r"""
#define TESTING
#include "train_gpt2.c"
static GPT2 model;
float *make(int context, int vocabulary, int padded, int layers, int heads, int features) {
    model.config = (GPT2Config){context, vocabulary, padded, layers, heads, features};
    fill_in_parameter_sizes(model.param_sizes, model.config);
    for (int i = 0; i < NUM_PARAMETER_TENSORS; i++) model.num_parameters += model.param_sizes[i];
    model.params_memory = malloc_and_point_parameters(&model.params, model.param_sizes);
    memset(model.params_memory, 0, model.num_parameters * sizeof(float));
    return model.params_memory;
}
float step(int *x, int *y, int batch, int time, float rate) {
    gpt2_forward(&model, x, y, batch, time);
    gpt2_zero_grad(&model);
    gpt2_backward(&model);
    #pragma omp parallel for
    for (size_t i = 0; i < model.num_parameters; i++) model.params_memory[i] -= rate * model.grads_memory[i];
    return model.mean_loss;
}
"""


class LlmcTrainer(Trainer):
    """Its one process.

    Args:
        contestant: what it runs, and where its sources are.
        rank: 0.
        folder: where data and first weights are, and the library goes.
    """

    def __init__(self, contestant: Contestant, rank: int, folder: Path) -> None:
        super().__init__(contestant, rank)
        file = folder / f"llmc-{contestant.ranks}.so"
        subprocess.run([*COMPILER, "-I", contestant.source, "-o", file, "-lm"], input=CALLS, text=True, check=True)
        library = ctypes.CDLL(str(file))
        library.step.restype, library.make.restype = ctypes.c_float, ctypes.POINTER(ctypes.c_float)
        self._call = library.step
        self._x, self._y = (np.ascontiguousarray(each, np.int32) for each in self.load(folder))
        self._time, features, heads, layers, context, vocabulary = self.case.sizes
        padded = -(-vocabulary // ROWS) * ROWS
        start = library.make(context, vocabulary, padded, layers, heads, features)
        size = ends(self.case, padded)[-1]
        self._arrays = views(np.ctypeslib.as_array(start, (size,)), self.case, padded)

    def step(self) -> float:
        """See `Trainer.step`."""
        x, y = (each.ctypes.data_as(ctypes.c_void_p) for each in (self._x, self._y))
        return float(self._call(x, y, self.case.batch, self._time, ctypes.c_float(self.lr)))

    def barrier(self) -> None:
        """See `Trainer.barrier`."""

    def arrays(self) -> list[NDArray[Any]]:
        """See `Trainer.arrays`."""
        return self._arrays

    def facts(self) -> dict[str, str]:
        """See `Trainer.facts`."""
        return {}

    def close(self) -> None:
        """See `Trainer.close`."""


def shapes(case: Case, padded: int) -> list[tuple[int, ...]]:
    """Return the shapes of its parameters, as they follow one another."""
    _, features, _, layers, context, _ = case.sizes
    wide, vector = 4 * features, (features,)
    block: list[tuple[int, ...]] = [vector, vector, (3 * features, features), (3 * features,), (features, features)]
    block += [vector, vector, vector, (wide, features), (wide,), (features, wide), vector]
    return [(padded, features), (context, features), *((layers, *shape) for shape in block), vector, vector]


def ends(case: Case, padded: int) -> list[int]:
    """Return where each of them ends."""
    return list(accumulate(math.prod(shape) for shape in shapes(case, padded)))


def views(flat: NDArray[Any], case: Case, padded: int) -> list[NDArray[Any]]:
    """Return views in PyTorch's order: tables, block by block, last norm.

    Args:
        flat: all its parameters.
        case: a GPT.
        padded: rows of its table of tokens.
    """
    parts = np.split(flat, ends(case, padded)[:-1])
    found = [part.reshape(shape) for part, shape in zip(parts, shapes(case, padded), strict=True)]
    blocks = [array[layer] for layer in range(case.sizes[3]) for array in found[LAYERS]]
    return [found[0][: case.classes], found[1], *blocks, *found[LAYERS.stop :]]
