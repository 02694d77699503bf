"""What the cost model says each row should take: a fit that was made before, or now, or none."""

from benchmarks.collectives.options import Options
from nnmpi.comm.group import Group
from nnmpi.train.progress import Console

NO_FIT = "no fit"


class Prediction:
    """Predicts times from a fitted model, or nothing without one.

    Attributes:
        name: the fit in words, with its file and date.
    """

    def __init__(self, name: str = NO_FIT) -> None:
        self.name = name

    @classmethod
    def find(cls, options: Options, group: Group, console: Console) -> "Prediction":
        """Return the predictions of the fit that the options ask for. Collective."""
        return cls()

    def seconds(self, algorithm: str, nbytes: int) -> float | None:
        """Return the time of one call, None where the model says nothing."""
        return None
