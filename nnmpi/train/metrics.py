"""metrics.jsonl: a JSON object per line, each flushed at once: a kill loses at most the last one.

    {"kind": "train", "global_step": 10, "epoch": 0.45, "loss": ..., "accuracy": ...,
     "learning_rate": ..., "grad_norm": ..., "elapsed_s": ..., "samples_per_second": ...,
     "step_s": ..., "compute_s": ..., "wait_s": ..., "sync_s": ..., "input_s": ..., "hidden_s": ...,
     "comm_bytes": ..., "comm_calls": ..., "predicted_sync_s": ..., "memory_parameters": ...,
     "memory_gradients": ..., "memory_optimizer": ..., "memory_activations": ...,
     "memory_communication": ..., "memory_batches": ..., "memory_peak": ...}
    {"kind": "eval", "global_step": 22, "epoch": 1.0, "loss": ..., "accuracy": ...,
     "elapsed_s": ..., "runtime": ..., "samples_per_second": ..., "steps_per_second": ...}
        after the epochs, or steps, of --eval-every
    {"kind": "test", ...}     as eval, once, at the end
    {"kind": "staleness", "global_step": 22, "epoch": 1.0, "mean": ..., "max": ..., "lead": ...,
     "updates": ..., "disagreement": ..., "messages": ..., "bytes": ...,
     "workers": [{"worker": 0, "steps": 22, "mean": ..., "max": ...,
                  "histogram": [[staleness, count], ...]}, ...]}
    {"kind": "staleness_run", ...}     mean, max, histogram and workers over the run, at the end

Times are rank 0's, in seconds per step; with "workers" they are means over that many workers.
`step_s` lasts from the end of the previous step to the end of this one. `wait_s` is the pipeline's
bubble: waiting for other stages. While messages were in flight, the rank computed for `hidden_s`
and waited for `sync_s`; the fitted cost model predicts `predicted_sync_s` for them (null without a
fit). `comm_bytes` and `comm_calls`, per step, count the arrays that rank 0's collectives summed,
gathered or exchanged, of gradients, statistics, tied weights and numbers, not a pipeline's
messages. `epoch` counts passes over the data, with a fraction.

Keys that begin with "memory_" are rank 0's peak bytes per purpose, and in total (see
`memory.ledger`). Activations are measured in the second step, and again with each larger batch;
before that they are 0.

Asynchronous training writes a staleness record at the end of each segment. A gradient's staleness
is the number of updates to its weights between their read and the gradient's update. With local SGD
it is the number of the worker's own steps since all ranks had equal weights. With gossip it is
undefined ("mean" and "max" are null, "workers" is empty). In such segments the train records
describe the gradients that rank 0 receives, or rank 0's own, and lack `comm_bytes` and
`comm_calls`.

`lead` is the largest number of steps by which a worker was ahead of the slowest. `updates` counts
updates of the weights. `disagreement` is the distance of the ranks' weights from their mean before
averaging, relative to the mean's norm. `messages` and `bytes` are per step, over all ranks.

With --precision fp16, train records have "loss_scale", the factor on the loss in the last step, and
"skipped_steps", the run's number of updates that were skipped because a gradient exceeded the range
of float16.

With --pipeline pipedream, train records have "staleness": by how many updates the weights of a
microbatch's forward were older than the weights that its gradient updated; a mean over the last
step.

For quantities, train, eval and test records have "rmse" and "r2" in place of "accuracy": the root
mean squared error, and the explained share of the variance of all training (or test) targets. They
and the loss are in the units of the data, also where the model learns normalized targets.

Eval and test records have each metric of --metric and --best-by, too, under its name.

For tokens, loss and accuracy are means over tokens without padding, and train, eval and test
records have "perplexity", exp(loss), and "tokens_per_second".

On a device, train records have "device_peak_bytes": the peak of rank 0's memory there.

Every record ends with "time", the time of writing in seconds since 1970. `elapsed_s` are the
seconds of the run so far, without the pauses between its starts. On simulated ranks all times are
simulated.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from io import FileIO
from math import isfinite
from pathlib import Path
from typing import Any

import nnmpi.base.clock as clock
from nnmpi.base.custom import fault
from nnmpi.base.errors import CheckpointError, NnmpiError, UsageError, asks_to_stop, raised_as
from nnmpi.base.files import (
    foreign,
    json_text,
    opened_to_write,
    read_records,
    rebuilt,
    write_atomically,
)
from nnmpi.compose.stats import Staleness
from nnmpi.train.folder import RunFolder

RUN_STALENESS = "staleness_run"
# of eval and test records; all else in them are metrics
EVALUATION_FIELDS = frozenset(
    {
        *("kind", "global_step", "epoch", "loss", "elapsed_s", "time", "runtime"),
        *("samples_per_second", "steps_per_second", "tokens_per_second"),
    }
)
AT_THE_END = ("test", RUN_STALENESS)
_TYPES = {"kind": str, "global_step": int}  # of what each record has


def read_metrics(
    file: Path,
    kind: type[NnmpiError] = UsageError,
    what: str = "the metrics of the run cannot be read",
) -> list[dict[str, Any]]:
    """Return the records of the file, without a last line that a kill has truncated.

    Args:
        file: such as metrics.jsonl.
        kind, what: of the error, see `base.files.foreign`.

    Raises:
        NnmpiError: of the kind, with the file, for one that cannot be read, and with the line for a
            record that no run writes.
    """
    with foreign(file, kind, what):
        records = [*read_records(file)]
        for number, record in enumerate(records, 1):
            try:
                checked_record(record)
            except (KeyError, TypeError, ValueError) as error:
                reason = f"{error} is missing" if isinstance(error, KeyError) else error
                raise ValueError(f"line {number}: {reason}") from None
        return records


def checked_record(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record that a run may have written: all values are numbers, but kind and counts.

    Raises:
        KeyError, TypeError, ValueError: with the reason.
    """
    counts: tuple[str, ...] = ()
    if record["kind"] in ("staleness", RUN_STALENESS):
        Staleness.from_json(record)
        counts = ("workers", "histogram")
    for key, kind in _TYPES.items():
        _check(record, key, kind)
    for key in record.keys() - {*counts, *_TYPES}:
        value = record[key]
        if value is not None and type(value) is not float:  # JSON's are finite
            _check(record, key, float)
    if record["global_step"] < 0:
        raise ValueError(f"global_step is {record['global_step']}")
    return record


def _check(record: Mapping[str, Any], key: str, kind: type) -> None:
    """Refuse a value of another type.

    Raises:
        KeyError, TypeError, ValueError: with the key.
    """
    value = record[key]
    try:
        rebuilt(kind, value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{key}: {error}") from None


def cut_metrics(file: Path, step: int) -> int:
    """Remove the records after this step, and those of the run's end; return their number.

    A run resumed at this step writes them again.

    Raises:
        CheckpointError: for a file that is damaged or cannot be written.
    """
    if not file.exists():
        return 0
    what = "damaged or cannot be written; move it away to continue without it"
    records = read_metrics(file, CheckpointError, what)
    with foreign(file, CheckpointError, what):
        saved = [
            item
            for item in records
            if item["global_step"] <= step and item["kind"] not in AT_THE_END
        ]
        write_atomically(file, "".join(json_text(record) + "\n" for record in saved).encode())
        return len(records) - len(saved)


class MetricsRecorder(AbstractContextManager["MetricsRecorder"]):
    """Write records on the rank with a folder; each line completely or not at all.

    If the disk is full, records stay in memory until the next one: the run ends only at a
    checkpoint that cannot be written.

    Args:
        folder: of the run; None on ranks that record nothing.
        callback: called with each record, as in the file; it may ask to stop, see
            `nnmpi.StopTraining`.

    Raises:
        NnmpiError: when the file cannot be opened.
    """

    def __init__(
        self, folder: RunFolder | None, callback: Callable[[dict[str, Any]], object] | None = None
    ) -> None:
        self._folder, self._pending, self._callback = folder, b"", callback
        self.asks_to_stop = False  # whether the callback does
        self._stream: FileIO | None = None
        if folder is not None:
            with self._explain_errors():
                self._stream = opened_to_write(folder.metrics, "ab", buffering=0)

    def write(self, record: dict[str, Any]) -> None:
        """Write and flush one record; the module explains its keys. nan and inf become null."""
        if self._stream is not None:
            finite = {
                k: None if isinstance(value, float) and not isfinite(value) else value
                for k, value in record.items()
            }
            finite["time"] = clock.calendar()
            self._pending += json_text(finite).encode() + b"\n"
            with suppress(OSError):
                self._write_out()
            if self._callback is not None:
                self._call(self._callback, finite)

    def _call(self, callback: Callable[[dict[str, Any]], object], record: dict[str, Any]) -> None:
        """Call a user's function; what it raises ends the run, but never with status 0.

        Raises:
            NnmpiError: for an exception in it, with its line.
        """
        try:
            self.asks_to_stop |= asks_to_stop(callback, record)
        except (NnmpiError, KeyboardInterrupt):
            raise
        except BaseException as error:  # also SystemExit and GeneratorExit
            raise NnmpiError(
                f"--callback: {fault(callback, ['record'], error)}; mend it, and continue with"
                " --resume"
            ) from error

    def read(self) -> list[dict[str, Any]]:
        """Return all records of the run; none on ranks without a folder.

        Raises:
            NnmpiError: when the file cannot be read.
        """
        if self._folder is None:
            return []
        return read_metrics(
            self._folder.metrics, NnmpiError, "the run's metrics cannot be read again"
        )

    def sync(self) -> None:
        """Sync flushed records to disk: no checkpoint may be newer than its metrics.

        A background thread may call this while lines are written.

        Raises:
            OSError: when the disk fails.
        """
        if self._stream is not None:
            os.fsync(self._stream.fileno())

    def flush(self) -> None:
        """Write pending records to the file.

        Raises:
            OSError: when the disk is full.
            CheckpointError: when the file or the run's folder was removed or replaced. Otherwise
                the checkpoint would create a folder without the run's other files.
        """
        if (stream := self._stream) is None:
            return
        is_same = False
        with suppress(FileNotFoundError):
            is_same = os.path.samestat(os.stat(stream.name), os.fstat(stream.fileno()))
        if not is_same:
            raise CheckpointError(
                f"{stream.name} was removed or moved while the run went on; nothing more is written"
                " there, and where the run's folder is, its last checkpoint can be resumed"
            )
        self._write_out()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the file.

        Raises:
            NnmpiError: when the last records cannot be written.
        """
        if self._stream is not None:
            with self._explain_errors() if error is None else suppress(OSError), self._stream:
                self._write_out()

    def _write_out(self) -> None:
        """Append pending records; on an error truncate the file to its length before."""
        assert self._stream is not None
        view, length = memoryview(self._pending), self._stream.seek(0, os.SEEK_END)
        try:
            while view:
                view = view[self._stream.write(view) :]
        except OSError:
            with suppress(OSError):
                self._stream.truncate(length)
            raise
        self._pending = b""

    def _explain_errors(self) -> AbstractContextManager[None]:
        path = self._folder and self._folder.path
        return raised_as(
            NnmpiError, f"metrics cannot be written into {path}", "checkpoints are intact"
        )


def sum_staleness(records: Sequence[Mapping[str, Any]]) -> Staleness:
    """Return a run's counts, summed over its "staleness" records by worker number.

    The number of workers may change on resume.
    """
    return Staleness.sum(
        [Staleness.from_json(record) for record in records if record["kind"] == "staleness"]
    )
