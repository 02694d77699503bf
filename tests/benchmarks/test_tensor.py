"""The tensor benchmark: its formulas beside the models, its judgement, its tables."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.tensor.formulas import activation_bytes, exchanged_bytes, parameter_bytes, wire_bytes
from benchmarks.tensor.memory import measure
from benchmarks.tensor.networks import Network
from benchmarks.tensor.parts import TENSOR, memory_table, missed_memory, times_table
from nnmpi.comm.group import Group

NETWORKS = [Network("mlp", 32, 64, 7), Network("cnn", 8)]
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_parameters_are_those_of_the_model(network: Network) -> None:
    elements = sum(parameter.size for parameter in network.build().parameters())
    assert parameter_bytes(network, 1) == 16 * elements + 512 * 1024
    assert parameter_bytes(network, 1) / 4 < parameter_bytes(network, 4) < parameter_bytes(network, 2)


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_more_ranks_keep_less_each_and_send_more(network: Network) -> None:
    kept = [activation_bytes(network, ranks) for ranks in (2, 4)]
    assert kept[1] < kept[0]
    assert exchanged_bytes(network, 1) == {}
    sent = [wire_bytes(exchanged_bytes(network, ranks), ranks) for ranks in (2, 4)]
    assert 0 < sent[0] < sent[1]


def test_one_rank_keeps_what_the_formulas_say(group: Group) -> None:
    alone, settings = (
        group.split(group.rank),
        {"networks": [vars(Network("mlp", 128, 256, 7)), vars(Network("cnn", 32))]},
    )
    assert missed_memory({"settings": settings, "rows": measure(alone, settings)}) == []


def _content(**changes: Any) -> dict[str, Any]:
    network = NETWORKS[0]
    row = {"network": "mlp", "tp": 2, "rank": 0, "exchanged_bytes": exchanged_bytes(network, 2)}
    row |= {"parameter_bytes": parameter_bytes(network, 2), "activation_bytes": activation_bytes(network, 2)}
    row["building_bytes"] = row["parameter_bytes"]
    return {"settings": {"networks": [vars(network)]}, "rows": [row | changes]}


def test_memory_is_judged() -> None:
    assert missed_memory(_content()) == []
    assert "| mlp | 2 | " in memory_table(_content())
    (more,) = missed_memory(_content(activation_bytes=1.2 * activation_bytes(NETWORKS[0], 2)))
    assert more == "mlp, tp 2, rank 0: activations measured / formula 1.20"
    (other,) = missed_memory(_content(exchanged_bytes={"all-reduce": 1}))
    assert other.startswith("mlp, tp 2, rank 0: exchanged {'all-reduce': 1}, by the formula ")


def test_times_are_shown() -> None:
    row = {"network": "cnn", "tp": 2, "step_s": 0.01, "step_quartiles_s": [0.01, 0.01], "serial_s": 0.02}
    row |= {"serial_quartiles_s": [0.02, 0.02], "speed": 2.0, "speed_quartiles": [1.9, 2.1]}
    assert "| cnn | 2 | 10.0 (10.0 to 10.0) | 20.0 (20.0 to 20.0) | 2.00 (1.90 to 2.10) |" in times_table(
        {"rows": [row]}
    )


def test_the_readme_has_a_place_for_every_table() -> None:
    text = (ROOT / "benchmarks" / "tensor" / "README.md").read_text()
    assert all(f"<!-- {name} -->" in text for name in TENSOR.parts)
