"""The table of the big ones: models of the right size that fit as their systems lay them out; published figures."""

from dataclasses import replace

import pytest

from nnmpi.planner.described import DescribedShapes, grouped
from nnmpi.planner.survey import CLOSE, SurveyedSystem, SurveyRow, describe_survey, figure_of, systems

TOLD = {system.told["system"]: system.told for system in systems()}
PARAMETERS = {
    "FlexFlow": 24e6,
    "PipeDream": 138e6,
    "PyTorch DDP": 345e6,
    "GPipe": 557e6,
    "Mesh-TensorFlow": 4.9e9,
    "Megatron-LM": 8.3e9,
    "torchgpipe": 15.82e9,
    "KARMA": 17e9,
    "LBANN": 78.6e9,
    "ZeRO": 100e9,
}
QUICK = [name for name in PARAMETERS if name != "KARMA"]  # 2048 ranks take seconds


def row(name: str) -> SurveyRow:
    system = SurveyedSystem(TOLD[name])
    price, total = system.own()
    found = SurveyRow(system, price, total, None, None)
    return replace(found, figure=figure_of(found))


@pytest.mark.parametrize(("name", "parameters"), PARAMETERS.items())
def test_models_have_the_size_that_is_stated(name: str, parameters: float) -> None:
    assert SurveyedSystem(TOLD[name]).parameters == pytest.approx(parameters, rel=0.04)


@pytest.mark.parametrize("name", QUICK)
def test_systems_fit_as_they_are_laid_out_and_deviations_are_explained(name: str) -> None:
    found = row(name)
    assert 0 < found.own.bytes <= found.system.limit_bytes
    assert found.factor is None or 1 / CLOSE <= found.factor <= CLOSE or found.system.told["why"]
    assert (found.factor is None) == ("no_figure" in found.system.told)
    lines = list(describe_survey(found))
    assert max(map(len, lines)) <= 100
    assert any(TOLD[name]["device"]["name"] in line for line in lines)


def test_the_planner_finds_a_layout_that_fits_where_there_is_one() -> None:
    system = SurveyedSystem(TOLD["GPipe"])
    chosen = system.choose()
    assert chosen is not None
    assert chosen.price.bytes <= system.limit_bytes
    assert chosen.price.seconds < system.own()[0].seconds
    assert SurveyedSystem(TOLD["torchgpipe"]).choose() is None


def test_shared_state_of_described_models_adds_up_to_the_whole() -> None:
    system = SurveyedSystem(TOLD["Megatron-LM"])
    for layers in (system.layers, grouped(system.layers, 10)):
        shapes = DescribedShapes(layers, TOLD["Megatron-LM"]["bytes"])
        for tp, pp, zero, replicas in ((1, 1, 0, 1), (8, 1, 0, 1), (2, 4, 0, 1), (1, 1, 3, 16), (4, 2, 3, 8)):
            parts = shapes.states(tp, pp, 1, zero, replicas, False)
            whole = sum(part.parameters + part.gradients + part.optimizer for part in parts) * tp * replicas
            assert whole / (replicas if not zero else 1) == pytest.approx(16 * system.parameters, rel=1e-6)
