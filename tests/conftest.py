"""Settings for all tests: the MPI harness, and hypothesis."""

from hypothesis import settings

pytest_plugins = (
    "tests.harness.plugin",
    "tests.harness.simulated",
    "tests.harness.recordings",
    "tests.device.plugin",
)

# All ranks must see the same examples, or their collectives do not pair: nothing random, nothing
# remembered, and no deadline, since many ranks share few cores.
settings.register_profile("nnmpi", derandomize=True, database=None, deadline=None)
settings.load_profile("nnmpi")
