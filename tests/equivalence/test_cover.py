"""The table of runs leaves nothing out."""

from itertools import product

from tests.equivalence.cover import ALGORITHMS, MODELS, SCHEDULES, WORLDS, cases, meshes

ALL = {world: cases(world) for world in WORLDS}
EVERY = [case for found in ALL.values() for case in found]


def test_every_layout_meets_every_model():
    for world, found in ALL.items():
        assert {case.mesh for case in found} == set(meshes(world))
        for mesh in meshes(world):
            assert {case.model for case in found if case.mesh == mesh} == set(MODELS), mesh


def test_every_kind_of_layout_meets_every_model_under_every_schedule():
    for kind in {case.kind for case in EVERY if case.pp > 1}:
        met = {(case.model, case.schedule) for case in EVERY if case.kind == kind}
        assert met == set(product(MODELS, SCHEDULES)), kind


def test_every_all_reduce_meets_every_kind_of_layout_with_replicas():
    for kind in {case.kind for case in EVERY if case.dp > 1}:
        assert {case.allreduce for case in EVERY if case.kind == kind} == set(ALGORITHMS), kind


def test_every_schedule_meets_every_recomputation():
    met = {(case.schedule, case.memory) for case in EVERY if case.pp > 1}
    assert met == set(product(SCHEDULES, (None, "least")))
