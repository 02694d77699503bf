"""metrics.jsonl: a JSON object per line, flushed at once, so a killed run has whole lines.

    {"kind": "train", "global_step": 10, "epoch": 0.45, "loss": ..., "accuracy": ..., "learning_rate": ...,
     "grad_norm": ..., "elapsed_s": ..., "samples_per_second": ..., "step_s": ..., "compute_s": ..., "wait_s": ...,
     "sync_s": ..., "input_s": ..., "hidden_s": ..., "comm_bytes": ..., "comm_calls": ..., "predicted_sync_s": ...,
     "memory_parameters": ..., "memory_gradients": ..., "memory_optimizer": ..., "memory_activations": ...,
     "memory_communication": ..., "memory_batches": ..., "memory_peak": ...}
    {"kind": "eval", "global_step": 22, "epoch": 1.0, "loss": ..., "accuracy": ..., "elapsed_s": ...,
     "runtime": ..., "samples_per_second": ..., "steps_per_second": ...}
        after the epochs, or steps, of --eval-every
    {"kind": "test", ...}     as eval, once, at the end
    {"kind": "staleness", "global_step": 22, "epoch": 1.0, "mean": ..., "max": ..., "lead": ..., "updates": ...,
     "disagreement": ..., "messages": ..., "bytes": ...,
     "workers": [{"worker": 0, "steps": 22, "mean": ..., "max": ..., "histogram": [[staleness, count], ...]}, ...]}
    {"kind": "staleness_run", ...}     mean, max, histogram and workers over all of these, once, at
                                       the end

Times are rank 0's, in seconds and per step; `step_s` lasts from the end of the step before to its
own. `comm_bytes` and `comm_calls` are per step as well: what was summed over the ranks. While
messages were under way the rank computed for `hidden_s` and waited for `sync_s`; the fitted model
gives them `predicted_sync_s` (null without a fit). `wait_s` is the pipeline's bubble: waiting for
other stages. `epoch` counts passes over the data, with its fraction.

The bytes that rank 0 has had at most for each purpose, and for all together, begin with "memory"
(see `memory.ledger`); activations are 0 before they are measured, in the second step, and again
with each larger batch.

A record of kind staleness is there for each segment in which the ranks were not in step, at its
end. A gradient's staleness is the number of updates that its weights have seen between being read
and being updated with it; with local SGD, the number of the worker's own steps since the weights
were the same everywhere; with gossip there is none ("mean" and "max" are null, "workers" is empty).
In such segments the train records are made of the gradients as rank 0 gets them, or of rank 0's
own, and have no `comm_bytes` and `comm_calls`.

`lead` is the largest number of steps by which a worker was ahead of the slowest, `updates` how
often the weights were updated. `disagreement` is how far the ranks' weights were from their mean
before they became that, relative to its length. `messages` and `bytes` are per step, over all
ranks.

With --precision fp16, train records have "loss_scale", what the gradients of the last step were
multiplied by on their way, and "skipped_steps": how many updates of the run were left out, as a
gradient was beyond the range of float16.

With --pipeline pipedream, train records have "staleness": by how many updates the weights of a
microbatch's forward were older than those that its gradient changed, as a mean over the last step.

Where quantities are predicted, train, eval and test records have "rmse" and "r2" in place of
"accuracy": the root of the mean squared error, and the share of the variance of all training (or
test) targets that is explained.

Where tokens are predicted, loss and accuracy are means over them, and train, eval and test records
have "perplexity", e to the loss, and "tokens_per_second"; padding is no token.

On a device, train records have "device_peak_bytes": the most that rank 0 has had of its memory at
once.

Every record ends with "time", when it was written, in seconds since the beginning of 1970.

`elapsed_s` are the seconds of the run so far, without those between its parts if it was resumed. On
simulated ranks all times are simulated ones.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from io import FileIO
from math import isfinite
from pathlib import Path
from types import TracebackType
from typing import Any

import nnmpi.clock as clock
from nnmpi.errors import CheckpointError, NnmpiError, raised_as
from nnmpi.files import appending, foreign, parse_json, read_text, write_atomically
from nnmpi.synchrony.consistency import Staleness
from nnmpi.train.folder import RunFolder

to_line = json.JSONEncoder(allow_nan=False).encode  # `json.dumps` makes an encoder for each call
RUN_STALENESS = "staleness_run"
AT_THE_END = ("test", RUN_STALENESS)


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """Return the records of the file, without a last line that a kill has cut.

    Raises:
        ValueError: when a line before the last is no JSON object.
        OSError: when the file cannot be read.
    """
    lines = read_text(file).split("\n")
    full, rest = lines[:-1], lines[-1]  # what follows the last newline was not finished
    records = [parse_json(line) for line in full]
    if rest:
        try:
            records.append(parse_json(rest))
        except ValueError:
            return records
    return records


def cut_metrics(file: Path, step: int) -> int:
    """Remove the records after this step, so that a run that continues from it writes each step
    once.

    What is reported at the end of a run goes too, since it will be reported again. Returns the
    number of lines removed.

    Raises:
        CheckpointError: when the file is damaged or cannot be written.
    """
    if not file.exists():
        return 0
    with foreign(
        file, CheckpointError, "damaged or cannot be written; move it away to go on without it"
    ):
        records = read_metrics(file)
        saved = [
            item
            for item in records
            if item["global_step"] <= step and item["kind"] not in AT_THE_END
        ]
        write_atomically(file, "".join(json.dumps(record) + "\n" for record in saved).encode())
        return len(records) - len(saved)


class MetricsRecorder(AbstractContextManager["MetricsRecorder"]):
    """Writes records on the rank that has a folder; whole lines or nothing.

    What a full disk does not take waits in memory for the next record: a run ends at a checkpoint
    that cannot be written, and not before.

    Args:
        folder: of the run; None on the ranks that record nothing.
        callback: called with each record, as it stands in the file.

    Raises:
        NnmpiError: when a file cannot be written.
    """

    def __init__(
        self, folder: RunFolder | None, callback: Callable[[dict[str, Any]], object] | None = None
    ) -> None:
        self._folder, self._waiting, self._callback = folder, b"", callback
        self._stream: FileIO | None = None
        if folder is not None:
            with self._explained():
                self._place = os.stat(folder.path)
                self._stream = appending(folder.metrics, "ab", buffering=0)
                self._length = self._stream.tell()

    def write(self, record: dict[str, Any]) -> None:
        """Write one record; the docstring above explains its keys.

        It is there when this returns, if the disk takes it. Numbers that JSON has not (nan, inf)
        become null.
        """
        if self._stream is not None:
            timed = {**record, "time": clock.calendar()}
            finite = {
                k: None if isinstance(value, float) and not isfinite(value) else value
                for k, value in timed.items()
            }
            self._waiting += to_line(finite).encode() + b"\n"
            with suppress(OSError):
                self._write_out()
            if self._callback is not None:
                self._callback(finite)

    def read(self) -> list[dict[str, Any]]:
        """Return all records of the run; none on ranks without a folder.

        Raises:
            NnmpiError: when the file cannot be read.
        """
        if self._folder is None:
            return []
        try:
            return read_metrics(self._folder.metrics)
        except (OSError, ValueError) as error:
            raise NnmpiError(f"{self._folder.metrics} cannot be read again: {error}") from None

    def sync(self) -> None:
        """Wait until flushed records are on disk: no checkpoint may be newer than its metrics.

        A thread may do so while lines are written.

        Raises:
            OSError: when it cannot.
        """
        if self._stream is not None:
            os.fsync(self._stream.fileno())

    def flush(self) -> None:
        """Bring to the file what waits in memory.

        Raises:
            OSError: when the disk has no room for it.
            CheckpointError: when the folder is not the one in which the run began: half of it would
                be made again.
        """
        if self._folder is None:
            return
        try:
            there = os.path.samestat(os.stat(self._folder.path), self._place)
        except FileNotFoundError:
            there = False
        if not there:
            raise CheckpointError(
                f"the run's folder {self._folder.path} was removed or moved while the run went on;"
                " nothing more is written there, and where it was moved to, its last checkpoint"
                " can be resumed"
            )
        self._write_out()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the file.

        Raises:
            NnmpiError: when the last records cannot be written.
        """
        if self._stream is not None:
            with self._explained() if error is None else suppress(OSError), self._stream:
                self._write_out()

    def _write_out(self) -> None:
        """Bring what waits to the file; where it takes half of that, none of it stays."""
        assert self._stream is not None
        view = memoryview(self._waiting)
        try:
            while view:
                view = view[self._stream.write(view) :]
        except OSError:
            with suppress(OSError):
                self._stream.truncate(self._length)
            raise
        self._length, self._waiting = self._length + len(self._waiting), b""

    def _explained(self) -> AbstractContextManager[None]:
        place = self._folder.path if self._folder else ""
        return raised_as(
            NnmpiError, f"metrics cannot be written into {place}", "checkpoints are intact"
        )


def sum_staleness(records: Sequence[Mapping[str, Any]]) -> Staleness:
    """Return a whole run's counts, from its "staleness" records.

    Workers are counted together by their number also where a run was resumed with more or fewer of
    them.
    """
    return Staleness.sum(
        [Staleness.from_json(record) for record in records if record["kind"] == "staleness"]
    )
