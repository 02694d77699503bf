"""The folder of a run: what lies where, and who may write into it.

runs/digits-cnn-20260101-120000/
  config.json         every option of the run
  metrics.jsonl       see metrics.py
  checkpoints/        see checkpoint.py
  curves/             PNG files, with the plot extra
  tensorboard/        event files, with the tensorboard extra
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nnmpi.errors import CheckpointError, UsageError
from nnmpi.train.config import Config
from nnmpi.train.files import replace_durably
from nnmpi.train.metrics import METRICS_FILE, truncate_metrics
from nnmpi.train.options import flatten
from nnmpi.train.own import short_name
from nnmpi.train.parse import CONFIG_FILE


@dataclass(frozen=True)
class RunFolder:
    """The names inside a run's folder."""

    path: Path

    @property
    def config(self) -> Path:
        """Return the file with the options."""
        return self.path / CONFIG_FILE

    @property
    def metrics(self) -> Path:
        """Return the file with the metrics."""
        return self.path / METRICS_FILE

    @property
    def checkpoints(self) -> Path:
        """Return the folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def curves(self) -> Path:
        """Return the folder of the plots."""
        return self.path / "curves"

    @property
    def events(self) -> Path:
        """Return the folder of TensorBoard's files."""
        return self.path / "tensorboard"

    def check_free(self) -> None:
        """Check that a new run may be written here, before any work is done.

        Raises:
            UsageError: when the folder holds a run, or the path is no folder, or a name that the system refuses.
        """
        with self._written():
            for file in (self.config, self.metrics, self.checkpoints):
                if file.exists():
                    raise UsageError(
                        f"--out {self.path} already holds a run ({file.name}); go on with it by --resume {self.path}, "
                        "or give another folder"
                    )
            if self.path.exists() and not self.path.is_dir():
                raise UsageError(f"--out {self.path} is a file; give a folder")

    def make(self) -> None:
        """Make the folder if needed.

        Raises:
            UsageError: when it cannot be made.
        """
        with self._written():
            self.path.mkdir(parents=True, exist_ok=True)

    def create(self, config: Config) -> None:
        """Make the folder if needed and write config.json into it.

        Raises:
            UsageError: when it cannot be written.
        """
        self.make()
        text = json.dumps(flatten(config) | {"resume": None}, indent=1, allow_nan=False)
        with self._written():
            replace_durably(self.config, text.encode() + b"\n")

    @contextmanager
    def _written(self) -> Iterator[None]:
        """Turn the system's refusals into a sentence."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            raise UsageError(f"--out {self.path} cannot be written ({reason}); give a folder that can") from None

    def cut(self, step: int) -> None:
        """Remove the metrics after this step, so that a run that goes on from it writes each step once.

        Raises:
            CheckpointError: when metrics.jsonl is damaged or cannot be written.
        """
        try:
            truncate_metrics(self.metrics, step)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{self.metrics} is damaged or cannot be written ({error}); move it away to go on without it"
            ) from None


def default_folder(config: Config, runs: Path = Path("runs")) -> Path:
    """Return a name for the run that is not taken: runs/DATASET-MODEL-TIME, with a number if need be.

    Raises:
        UsageError: when the system does not say which names are taken.
    """
    stem = f"{Path(config.data.dataset).stem}-{short_name(config.model.model)}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (runs / (stem if number == 1 else f"{stem}-{number}") for number in range(1, 10_000))
    try:
        return next(name for name in names if not name.exists())
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"the folder {runs} cannot be written ({reason}); give another one with --out") from None
