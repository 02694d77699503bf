"""For jobs of the tests: nothing that draws is installed, since loading it takes longer than most jobs train."""

import sys

sys.modules["tensorboardX"] = None  # type: ignore[assignment]
