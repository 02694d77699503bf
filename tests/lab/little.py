"""Plans of the smallest runs, in tests that ask what a plan says, not whether it is right."""

from nnmpi.lab import measure
from nnmpi.lab.planner import network, profile


def measure_little(patch):
    """Let a plan's parts be timed once each, without warm-up; a pytest.MonkeyPatch ends it."""
    for module, name, value in (
        (profile, "time_calls", lambda *given: measure.time_calls(*given[:2], 0.0)),
        (profile, "WARM_UP_STEPS", 0),
        (measure, "WARM_UP_ROUNDS", 1),
        (measure, "LEAST_ROUNDS", 1),
        (network, "FIT_S", 0.05),
        (measure, "ALL_REDUCE_SIZES", measure.ALL_REDUCE_SIZES[:-3]),  # up to a megabyte
    ):
        patch.setattr(module, name, value)
