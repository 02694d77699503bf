"""Each field of the library's options reaches the Worker, by a program and by the command.

A new field fails here until it has a row; so does one that is dropped on the way. Fields that are
keywords alone are no options of a command.
"""

from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from nnmpi import (
    AsynchronousWorker,
    GradientExchange,
    Layout,
    Numerics,
    Sync,
    Worker,
    arrange,
    models,
    optim,
    simulate,
)
from nnmpi.backend.backend import numpy_backend
from nnmpi.base.command import as_words
from nnmpi.train.build import build_full_model, build_trainer
from nnmpi.train.cli import parse
from nnmpi.train.derived import find_layout
from nnmpi.train.inputs import load_inputs

OWN = """
from nnmpi.parallel import GradientSum


class Plain(GradientSum):
    def sum(self, gradients):
        for grad in gradients.values():
            grad[...] = sum(self.gather(grad))
"""


def words_of(options):
    return [word for item in options.items() for word in as_words(*item).split()]


exec(OWN)  # what the command finds in own.py
SMALL = {"context": 8, "layers": 2, "features": 8, "heads": 2}
GPT = ["--model", "gpt", "--dataset", "paradise-lost", *words_of(SMALL)]
MLP = words_of({"model": "mlp", "dataset": "digits", "hidden": (6, 6, 6)})
EXPERTS = [*GPT, "--experts", "2"]
SHARDING = {}  # a table of no layers
# {field: its value, or that and what else it needs}; the values differ from the defaults
ROWS = {
    GradientExchange: {
        "allreduce": "ring",
        "sum": ("own.py:Plain", {}),
        "compress": "topk:0.5",
        "bucket_bytes": 64,
        "overlap": True,
        "fused_update": False,
        "check": True,
    },
    Layout: {
        "dp": 2,
        "pp": 2,
        "tp": 2,
        "sp": (2, {"model": "gpt"}),
        "pipeline": ("gpipe", {"pp": 2}),
        "virtual_stages": (2, {"pp": 2, "pipeline": "interleaved"}),
        "split": ((1, 7), {"pp": 2}),
        "reduction": "fixed",
        "zero": 1,
        "expert_parallel": (True, {"model": "experts"}),
        "memory_limit": 2**30,
        "activation_memory": 2**20,
        "offload": ("folder", {"activation_memory": 2**20}),
        "offload_state": ("optimizer", {"offload": "folder"}),
        "table": SHARDING,
        "state_arrays": 5,
        "sp_attention": ("ring", {"sp": 2, "model": "gpt"}),
        "unit_bytes": (512, {"zero": 2}),
    },
    Numerics: {"precision": "fp16", "clip": 0.5, "ema": 0.9},
    Sync: {
        "sync": "gossip",
        "staleness": (2, {"sync": "ssp"}),
        "local_steps": (3, {"sync": "local"}),
        "outer_lr": (0.7, {"sync": "local"}),
        "outer_momentum": (0.5, {"sync": "local"}),
    },
}
CASES = [(kind, name) for kind, rows in ROWS.items() for name in rows]


def row(kind, name):
    given = ROWS[kind][name]
    value, needs = given if isinstance(given, tuple) and isinstance(given[1], dict) else (given, {})
    return value, dict(needs)


def seen(trainer, kind, name):
    """Return the value of a field where a Worker uses it."""
    numerics = SimpleNamespace(
        precision=trainer.precision, clip=trainer.clip, ema=trainer.optimizer.ema
    )
    places = {Layout: trainer.arrangement.layout, Numerics: numerics}
    return getattr(places.get(kind, trainer.options), name)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    Path("folder").mkdir()  # to offload to


@pytest.mark.parametrize("kind", ROWS)
def test_each_field_has_a_row(kind):
    assert list(ROWS[kind]) == [item.name for item in fields(kind)]


@pytest.mark.parametrize("kind, name", CASES)
def test_by_the_library(kind, name):
    value, needs = row(kind, name)
    value, model = Plain if name == "sum" else value, needs.pop("model", "mlp")  # noqa: F821

    def build():
        if model == "mlp":
            return models.mlp((64,), 10, hidden=(6, 6, 6))
        return models.gpt(9, 8, 8, 2, 2, experts=2 if model == "experts" else 0)

    def main(group):
        chosen = kind(**{name: value, **needs})
        layout = chosen if kind is Layout else Layout()
        sample = np.zeros((2, 64), "float32") if model == "mlp" else np.zeros((2, 8), np.int64)
        where = arrange(build(), group, layout, sample)
        where.model.initialize(seed=0, storage=where.storage)
        optimizer = optim.Adam(where.model.storage)
        if kind is Sync:
            trainer = AsynchronousWorker(where.model, optimizer, group, chosen)
        else:
            options = {GradientExchange: "exchange", Numerics: "numerics"}
            given = {options[kind]: chosen} if kind in options else {}
            trainer = Worker(where.model, optimizer, group, arrangement=where, **given)
        return seen(trainer, kind, name)

    assert simulate(main, 2) == [value] * 2


@pytest.mark.parametrize(
    "kind, name",
    [(kind, item.name) for kind in ROWS for item in fields(kind) if not item.kw_only],
)
def test_by_the_command(kind, name):
    value, needs = row(kind, name)
    model = {"mlp": MLP, "gpt": GPT, "experts": EXPERTS}[needs.pop("model", "mlp")]
    words = words_of({**needs, name: value})
    words += ["--backend", "cupy"] * (name == "precision")  # only that is checked there

    def main(group):
        config = parse([*model, *words])
        layout, mesh = find_layout(config, group)
        inputs = load_inputs(config, group, lambda _: None, mesh)
        model_built = build_full_model(config, inputs.train, numpy_backend(), group)
        trainer = build_trainer(config, model_built, group, inputs, numpy_backend(), layout)
        found = seen(trainer, kind, name)
        return f"own.py:{found.__name__}" if name == "sum" else found

    assert simulate(main, 2) == [value] * 2
