"""Where a run stands: what a checkpoint's state.json holds beside the optimizer's scalars."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from nnmpi.errors import CheckpointError
from nnmpi.train.totals import Totals


@dataclass(frozen=True)
class State:
    """A run between two steps.

    Attributes:
        step: updates done.
        epoch, batch: the next batch: its epoch (from 0), and its number in the epoch.
        window: sums since the last line of training metrics.
        in_epoch: sums since the epoch began.
        best_accuracy, best_epoch: the best evaluation so far and after how many epochs it was; 0 for none.
        elapsed_s: seconds of training, evaluating and saving, over all parts of a resumed run.
        samples: rows of the training set, which `batch` counts in.
        virtual: where the clocks of virtual workers stand, in runs that have some; else None.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    window: Totals = field(default_factory=Totals)
    in_epoch: Totals = field(default_factory=Totals)
    best_accuracy: float = -1.0
    best_epoch: int = 0
    elapsed_s: float = 0.0
    samples: int = 0
    virtual: dict[str, Any] | None = None

    @property
    def virtual_s(self) -> float | None:
        """The virtual time in seconds; None in a run that has none."""
        return None if self.virtual is None else float(self.virtual["now_s"])

    def after_step(self, totals: Totals) -> "State":
        """Return the state after one more step with these numbers."""
        return replace(
            self,
            step=self.step + 1,
            batch=self.batch + 1,
            window=self.window.plus(totals),
            in_epoch=self.in_epoch.plus(totals),
        )

    def after_batches(self, batches: int, totals: Totals) -> "State":
        """Return the state after so many more steps that were not done one by one, with these sums over them."""
        step, batch = self.step + batches, self.batch + batches
        return replace(self, step=step, batch=batch, in_epoch=self.in_epoch.plus(totals))

    def after_epoch(self) -> "State":
        """Return the state at the beginning of the next epoch."""
        return replace(self, epoch=self.epoch + 1, batch=0, in_epoch=Totals())

    def after_evaluation(self, accuracy: float, epoch: int) -> "State":
        """Return the state with this evaluation after `epoch` epochs as the best, if it is better."""
        better = accuracy > self.best_accuracy
        return replace(self, best_accuracy=accuracy, best_epoch=epoch) if better else self

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "State":
        """Return what `to_json` gave; other values in the mapping are left alone.

        Raises:
            CheckpointError: when a value is missing.
        """
        try:
            plain = {name: values[name] for name in cls.__dataclass_fields__ if name != "virtual"}
            totals = {name: Totals.from_json(plain[name]) for name in ("window", "in_epoch")}
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"the checkpoint's state.json lacks a value: {error}") from None
        virtual = values.get("virtual")  # checkpoints of before there was any are still good
        return cls(**{**plain, **totals, "virtual": virtual})
