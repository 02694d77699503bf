"""Sums over steps: losses and hits weighted by samples, times by step; a mean is taken once, at the end."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Totals:
    """Sums over a number of steps; all fields add up.

    Attributes:
        steps, samples: counts.
        loss_sum, correct: sums over samples.
        compute_s, sync_s, input_s: seconds of computing, of waiting for other ranks, of waiting for batches.
        hidden_s: seconds of computing while messages were under way.
        comm_bytes, comm_calls: bytes of arrays that were summed over ranks, and collectives that did it.
        predicted_s: seconds that the fitted model gives that communication, in those of the steps that it knows.
        predicted_steps: the number of those steps.
        wait_s: seconds of waiting for other stages of a pipeline: its bubble.
        wall_s: seconds from the start of each step to its end.
    """

    steps: int = 0
    samples: int = 0
    loss_sum: float = 0.0
    correct: float = 0.0
    compute_s: float = 0.0
    sync_s: float = 0.0
    input_s: float = 0.0
    wall_s: float = 0.0
    hidden_s: float = 0.0
    comm_bytes: int = 0
    comm_calls: int = 0
    predicted_s: float = 0.0
    predicted_steps: int = 0
    wait_s: float = 0.0

    def plus(self, other: "Totals") -> "Totals":
        """Return the sums of both."""
        return Totals(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)})

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values; floats keep every bit."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Totals":
        """Return what `to_json` gave."""
        return cls(**values)

    @property
    def loss(self) -> float:
        """Return the mean loss of a sample."""
        return self.loss_sum / self.samples if self.samples else 0.0

    @property
    def accuracy(self) -> float:
        """Return the share of samples that were classified rightly, 0 to 1."""
        return self.correct / self.samples if self.samples else 0.0

    @property
    def samples_per_second(self) -> float:
        """Return samples per second of wall time."""
        return self.samples / self.wall_s if self.wall_s > 0 else 0.0

    def per_step(self, seconds: float) -> float:
        """Return a sum of seconds divided by the number of steps."""
        return seconds / self.steps if self.steps else 0.0

    @property
    def predicted_step_s(self) -> float | None:
        """Return what the model gives the communication of a step; None if it knows none."""
        return self.predicted_s / self.predicted_steps if self.predicted_steps else None

    def communication(self) -> str:
        """Return what was communicated in a step, how much of it computing hid, and what the model says."""
        steps, predicted_s = max(self.steps, 1), self.predicted_step_s
        share = self.hidden_s / max(self.sync_s + self.hidden_s, 1e-12)
        exposed_ms, hidden_ms = (1e3 * self.per_step(seconds) for seconds in (self.sync_s, self.hidden_s))
        predicted = "no fit to predict it by" if predicted_s is None else f"predicted {1e3 * predicted_s:.3g} ms"
        return (
            f"communication per step: {self.comm_calls / steps:.3g} calls, {self.comm_bytes / steps / 2**20:.3g} MB; "
            f"exposed {exposed_ms:.2f} ms, hidden by computing {hidden_ms:.2f} ms ({100 * share:.0f} %); {predicted}"
        )

    def breakdown(self) -> str:
        """Return where an iteration's time went, in ms and per cent of its wall time."""
        wall_s = max(self.wall_s, 1e-12)
        parts: tuple[tuple[str, float], ...] = (
            ("compute", self.compute_s),
            ("synchronisation", self.sync_s),
            ("input", self.input_s),
        )
        if self.wait_s:
            parts = (parts[0], ("waiting for stages", self.wait_s), *parts[1:])
        rest_s = max(0.0, self.wall_s - sum(seconds for _, seconds in parts))
        words = [
            f"{name} {1e3 * self.per_step(seconds):.2f} ms ({100 * seconds / wall_s:.0f} %)"
            for name, seconds in (*parts, ("other", rest_s))
        ]
        return f"step {1e3 * self.per_step(self.wall_s):.2f} ms = " + " + ".join(words)
