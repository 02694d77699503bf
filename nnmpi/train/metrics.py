"""metrics.jsonl: one JSON object per line, flushed at once, so that a killed run leaves whole lines.

    {"kind": "train", "global_step": 10, "epoch": 0.45, "loss": ..., "accuracy": ..., "learning_rate": ...,
     "grad_norm": ..., "samples_per_second": ..., "compute_s": ..., "sync_s": ..., "input_s": ..., "hidden_s": ...,
     "comm_bytes": ..., "comm_calls": ..., "predicted_sync_s": ...}
    {"kind": "eval", "global_step": 22, "epoch": 1.0, "loss": ..., "accuracy": ..., "runtime": ...,
     "samples_per_second": ..., "steps_per_second": ...}
    {"kind": "test", ...}     as eval, once, at the end
    {"kind": "staleness", "global_step": 22, "epoch": 1.0, "mean": ..., "max": ..., "lead": ..., "updates": ...,
     "dropped": ..., "undealt": ..., "disagreement": ..., "messages": ..., "bytes": ...,
     "workers": [{"worker": 0, "steps": 22, "mean": ..., "max": ..., "histogram": [[staleness, count], ...]}, ...]}
    {"kind": "staleness_run", ...}     mean, max, histogram and workers over all of these, once, at the end

Times are in seconds and per step, `comm_bytes` and `comm_calls` per step as well: what was summed over the ranks. While
messages were under way the rank computed for `hidden_s` and waited for `sync_s`; the fitted model gives them
`predicted_sync_s` (null without a fit). `epoch` counts passes over the data, with its fraction.

A record of kind staleness is there for each segment in which the ranks were not in step, at its end. A gradient's
staleness is the number of updates that its weights have seen between being read and being updated with it; with local
SGD, the number of the worker's own steps since the weights were the same everywhere; with gossip there is none ("mean"
and "max" are null, "workers" is empty). In such segments the train records are made of the gradients as server 0 gets
them, or of rank 0's own, and have no `comm_bytes` and `comm_calls`.

`lead` is the largest number of steps by which a worker was ahead of the slowest, `updates` how often the weights were
updated, `dropped` the gradients that came too late, `undealt` the parts of batches that nobody had begun when their
step was over. `disagreement` is how far the ranks' weights were from their mean before they became that, relative to
its length. `messages` and `bytes` are per step, over all ranks.

With --precision fp16, train records have "loss_scale", what the gradients of the last step were multiplied by on their
way, and "skipped_steps": how many updates of the run were left out, as a gradient was beyond the range of float16.

On a device, train records have "device_peak_bytes": the most that rank 0 has had of its memory at once.

In virtual time, train, eval and test records have "virtual_s": the seconds since the run began.
"""

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from nnmpi.train.files import replace_durably

METRICS_FILE = "metrics.jsonl"
RUN_STALENESS = "staleness_run"
AT_THE_END = ("test", RUN_STALENESS)


class Metrics:
    """The open file of one run; a context manager."""

    def __init__(self, file: Path) -> None:
        """Open the file to append to it."""
        self._stream: IO[str] = file.open("a", encoding="utf-8")

    def write(self, record: dict[str, Any]) -> None:
        """Append one line; it is in the file when this returns. Numbers that JSON has not (nan, inf) become null.

        Raises:
            OSError: when the disk is full.
        """
        finite = {key: None if _no_number(value) else value for key, value in record.items()}
        self._stream.write(json.dumps(finite, allow_nan=False) + "\n")
        self._stream.flush()

    def sync(self) -> None:
        """Wait until the disk has all lines: a checkpoint must not be newer than its metrics."""
        os.fsync(self._stream.fileno())

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """Return the records of the file, without a last line that a kill has cut.

    Raises:
        ValueError: when a line before the last is no JSON object.
        OSError: when the file cannot be read.
    """
    lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
    whole, rest = lines[:-1], lines[-1]  # what follows the last newline was not finished
    records = [json.loads(line) for line in whole]
    if rest:
        try:
            records.append(json.loads(rest))
        except ValueError:
            return records
    return records


def truncate_metrics(file: Path, step: int) -> int:
    """Remove what lies after `step`, and what is told at the end, which will be again; return the lines removed.

    Raises:
        OSError: when the file cannot be read or written.
    """
    if not file.exists():
        return 0
    records = read_metrics(file)
    kept = [each for each in records if each["global_step"] <= step and each["kind"] not in AT_THE_END]
    replace_durably(file, _lines(kept))
    return len(records) - len(kept)


def _no_number(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _lines(records: Iterable[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()
