"""Reports of a run: lines for people and records for programs, both on rank 0.

Lines are plain, without colours or bars. Within an epoch a terminal shows one line, which is
rewritten, and a log gets one each minute.

To log another number per step: add it to `compose.stats.Totals` if it is a sum over steps, else to
`Trainer.details`; write it in `Reporter.steps`; explain it in metrics.py.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from textwrap import wrap
from typing import Any

import nnmpi.base.clock as clock
from nnmpi.base.command import Console, broken
from nnmpi.base.units import format_duration, format_seconds
from nnmpi.compose.evaluation import Evaluation
from nnmpi.compose.stats import PARTS, Totals, perplexity, r2
from nnmpi.compose.trainer import SegmentReport
from nnmpi.metrics.metric import Metric
from nnmpi.metrics.rows import METRICS
from nnmpi.train.checkpoint import RunState
from nnmpi.train.metrics import RUN_STALENESS, MetricsRecorder, sum_staleness
from nnmpi.train.run import TrainingRun

WIDTH = 78  # of lines of metrics
# what stands in an epoch's line
USUAL = frozenset(name for name, row in METRICS.items() if row.default_for)
TRAFFIC = ("comm_bytes", "comm_calls")
# Between two reports of progress within an epoch: on a terminal, and in a log.
SHOW_EVERY_S, LOG_EVERY_S = 0.5, 60.0


def describe_metrics(values: Mapping[str, float], known: Iterable[Metric] = ()) -> str:
    """Return metrics as text: "accuracy 98.06 %", or "RMSE 0.42, R2 0.9312".

    Args:
        values: by name.
        known: those of the user's own, which say how they are written.
    """
    rows = METRICS | {metric.name: metric for metric in known}
    return ", ".join(
        rows[name].text(value) if name in rows else f"{name} {value:.4g}"
        for name, value in values.items()
    )


def describe_result(totals: Totals, values: Mapping[str, float], tokens: bool) -> tuple[str, str]:
    """Return two texts: the loss (for tokens with the perplexity), and accuracy, or RMSE and R2."""
    perplexity = values.get("perplexity", totals.perplexity)
    extra = f", perplexity {perplexity:.4g}" if tokens else ""
    usual = {name: values[name] for name in values if name in USUAL and name != "perplexity"}
    return f"loss {totals.loss:.4f}{extra}", describe_metrics(usual)


def describe_asked(part: str, values: Mapping[str, float], asked: Sequence[Metric]) -> list[str]:
    """Return lines of the metrics that evaluations have only if they are asked for.

    Args:
        part: of the data, in front.
        values: by name.
        asked: the metrics that were asked for.
    """
    chosen = {metric.name: values[metric.name] for metric in asked}
    return wrap(f"{part} {describe_metrics(chosen, asked)}", WIDTH) if asked else []


def compare_hosts(window: Totals, hosts: int) -> str:
    """Return a line on the gain of several hosts over one, by the cost model or as measured.

    One host would compute the rows of all hosts. Its sums of gradients go through shared memory and
    count as free.
    """
    compute_s, exposed_s, hidden_s = map(
        window.per_step, (window.compute_s, window.sync_s, window.hidden_s)
    )
    sums_s, source, one_s = window.predicted_step_s, "as measured", hosts * compute_s
    if sums_s is not None:
        exposed_s, source = max(sums_s - hidden_s, 0.0), "by the fitted model"
    ratio = (compute_s + exposed_s) / max(one_s, 1e-12)
    gain = (
        "take as long as one"
        if f"{ratio:.2g}" == "1"
        else f"take {ratio:.2g} times as long as one"
        if ratio >= 1
        else f"are {1 / ratio:.2g} times as fast as one"
    )
    return (
        f"on these links {hosts} hosts {gain}: a step computes for {format_seconds(compute_s)} and"
        f" waits for sums for {format_seconds(exposed_s)} ({source}); one host would compute for"
        f" {format_seconds(one_s)}"
    )


class Reporter:
    """Print lines and write records.

    Args:
        run: to report on.
        console: of the lines.
        recorder: of the records.
    """

    def __init__(
        self,
        run: TrainingRun,
        console: Console,
        recorder: MetricsRecorder,
    ) -> None:
        self._extent, self._console, self._recorder = run.extent, console, recorder
        self._tokens = run.predicts_tokens  # adds perplexity and tokens per second
        self._inputs, self._options = run.inputs, run.config.run
        self._metrics = run.metrics
        self._began = clock.now(), run.step or 0
        self.due_s = self._log_s = 0.0  # earliest times of the next line of progress
        self._wait()
        self._below: Sequence[str] = ()  # the last lines below an epoch
        replicas = run.trainer.arrangement.mesh.model.size == 1 and run.trainer.in_step
        self._hosts = len(set(run.group.nodes())) if replicas else 1
        self._windows = 0

    def steps(self, state: RunState, norm: float, lr: float, more: Mapping[str, Any]) -> None:
        """Report the steps in the state's window.

        Args:
            state: after the last of the steps.
            norm: of the last gradient; NaN for none.
            lr: the learning rate of the last step.
            more: further values of the record; they override means over the window.
        """
        window = state.window
        self._windows += 1
        if self._windows == 2 and self._hosts > 1:  # the first window includes slow first steps
            self._console.say(broken(f"  {compare_hosts(window, self._hosts)}"))
        self._write(
            "train",
            state,
            {
                "loss": window.loss,
                **self._metrics_of(window),
                "learning_rate": lr,
                "grad_norm": norm if isfinite(norm) else None,
                "elapsed_s": state.elapsed_s,
                "samples_per_second": window.samples_per_second,
                "step_s": window.per_step(window.wall_s),
                **{
                    part: window.per_step(getattr(window, part))
                    for part in (*PARTS, "hidden_s", *TRAFFIC)
                },
                "predicted_sync_s": window.predicted_step_s,
                **({"perplexity": window.perplexity} if self._tokens else {}),
                **self._token_rate(window.targets_per_second),
                **more,
            },
        )

    def progress(self, state: RunState) -> None:
        """Show the steps in the state's window, and the time left; from `due_s` on."""
        (began_s, first), now_s, window = self._began, clock.now(), state.window
        left_s = (now_s - began_s) / (state.step - first) * (self._extent.stop - state.step)
        at = f"  step {state.step}/{self._extent.steps}, {format_duration(left_s)} left"
        is_kept = now_s >= self._log_s
        self._console.show(f"{at}: {self.result(window)}, {self._rate(window)}", is_kept)
        self._wait(is_kept)

    def _wait(self, was_kept: bool = True) -> None:
        now_s = clock.now()
        if was_kept:
            self._log_s = now_s + LOG_EVERY_S
        self.due_s = now_s + SHOW_EVERY_S if self._console.is_terminal else self._log_s

    def result(self, totals: Totals, prefix: str = "") -> str:
        """Return loss and measures as text, see `describe_result`."""
        result = describe_result(totals, self._metrics_of(totals), self._tokens)
        return ", ".join(f"{prefix}{item}" for item in result)

    def values(self, totals: Totals, prefix: str = "") -> dict[str, float]:
        """Return loss and measures by name, with a prefix."""
        values = {"loss": totals.loss, **self._metrics_of(totals)}
        return {f"{prefix}{name}": value for name, value in values.items()}

    def _metrics_of(self, totals: Totals) -> dict[str, float]:
        """Return an evaluation's metrics; of steps, accuracy, or RMSE and R2, by their score."""
        if isinstance(totals, Evaluation):
            return totals.metrics
        variance = self._inputs.train.variance
        if variance is None:
            return {"accuracy": totals.accuracy}
        return {"rmse": totals.rmse, "r2": r2(totals.score, variance)}

    def asked(self, report: Evaluation) -> list[str]:
        """Return lines of the metrics that were asked for."""
        return describe_asked("test", report.metrics, self._metrics.asked)

    def _rate(self, totals: Totals) -> str:
        if self._tokens:
            return f"{totals.targets_per_second:.0f} tokens/s"
        return f"{totals.samples_per_second:.0f} samples/s"

    def _token_rate(self, per_second: float | None) -> dict[str, float | None]:
        return {"tokens_per_second": per_second} if self._tokens else {}

    def epoch(
        self,
        number: int,
        totals: Totals,
        report: Evaluation | None,
        more: Sequence[str] = (),
        suffix: str = "",
    ) -> None:
        """Print an epoch, or the last one's part.

        The metrics that were asked for come in a line below.

        Args:
            number: of the epoch, from 1.
            totals: sums over the epoch; times are means over the ranks.
            report: the evaluation after it, if there was one.
            more: lines below, see `say`.
            suffix: of the line of times, on their averaging.
        """
        trained = self.result(totals)
        has_wide = self._tokens or self._inputs.train.variance is not None
        if report is not None and has_wide:  # the test's metrics need the room
            trained = f"loss {totals.loss:.4f}; test {self.result(report)}"
        elif report is not None:
            accuracy = f", {100 * self._metrics_of(report)['accuracy']:.2f} %"
            trained += f"; test {report.loss:.4f}{accuracy}"  # in the order of the training's
        batches = self._extent.train_batches
        part = f" ({totals.steps} of {batches} batches)" if totals.steps < batches else ""
        line = f"epoch {number}/{self._extent.epochs}{part}: {trained}; {self._rate(totals)}"
        self._console.say(broken(line))
        if report is not None:
            self._console.say(*(f"  {line}" for line in self.asked(report)))
        if self._options.verbose:
            self._console.say(broken(f"  {totals.breakdown(suffix)}"))
            if totals.comm_calls:
                self._console.say(broken(f"  {totals.communication()}"))
        self.say(more)
        self._wait()

    def between(self, state: RunState, report: Evaluation) -> None:
        """Print an evaluation within an epoch."""
        self._console.say(
            f"{self._at(state)}: {self.result(report, 'test ')}, in {report.wall_s:.2f} s",
            *(f"  {line}" for line in self.asked(report)),
        )
        self._wait()

    def best(self, state: RunState, report: Evaluation) -> str:
        """Return the best evaluation as text; "" if the last one is the only one.

        Where the best weights are kept, it is the one that has them: at --stop-after that is not
        the last one, which an uninterrupted run does not make.
        """
        if not state.best_step:
            return ""
        by = self._metrics.best_by
        if not self._options.keeps_best:
            state = state.after_evaluation(report, by, self._options.least_gain)
        epoch, within = divmod(state.best_step, self._extent.train_batches)
        when = f"best after step {state.best_step}" if within else f"best epoch {epoch}"
        if by is not None:
            return f"; {when} with {by.text(state.best)}"
        if self._tokens:
            return f"; {when} with perplexity {perplexity(state.best):.4g}"
        return f"; {when} with loss {state.best:.4f}"

    def _at(self, state: RunState) -> str:
        return f"  step {state.step}/{self._extent.steps}, epoch {self._extent.passes(state):.2f}"

    def say(self, lines: Sequence[str]) -> None:
        """Print lines below an epoch's, without those that have not changed since the last call."""
        self._console.say(*(broken(f"  {line}") for line in lines if line not in self._below))
        self._below = lines

    def segment(self, state: RunState, report: SegmentReport) -> None:
        """Record the staleness of a segment's gradients, and its messages."""
        batches = max(report.batches, 1)
        stale = report.staleness
        counts = {"mean": None, "max": None, "workers": []} if stale is None else stale.to_json()
        self._write(
            "staleness",
            state,
            {
                "mean": counts["mean"],
                "max": counts["max"],
                "lead": report.lead,
                "updates": report.updates,
                "disagreement": report.disagreement,
                "messages": report.messages / batches,
                "bytes": report.bytes / batches,
                "workers": counts["workers"],
            },
        )

    def whole_run(self, state: RunState) -> None:
        """Record and print the staleness of the full run, including starts before a resume."""
        stale = sum_staleness(self._recorder.read())
        if gradients := stale.total.total():
            self._write(RUN_STALENESS, state, stale.to_json())
            line = (
                f"staleness over the run: {stale.mean():.2f} on average, at most {stale.largest()},"
                f" of {gradients:,} gradients"
            )
            self._console.say(broken(line))

    def evaluation(self, kind: str, state: RunState, report: Evaluation) -> None:
        """Record an evaluation.

        Args:
            kind: "eval" during the run, "test" at its end.
            state: of the evaluated weights.
            report: loss, metrics and time over the test data.
        """
        # no rate without a time: simulated ranks may compute in none
        per_s = 1 / report.wall_s if report.wall_s else None
        self._write(
            kind,
            state,
            {
                "loss": report.loss,
                **report.metrics,
                "elapsed_s": state.elapsed_s,
                "runtime": report.wall_s,
                "samples_per_second": per_s and report.samples * per_s,
                "steps_per_second": per_s and self._extent.test_batches * per_s,
                **self._token_rate(per_s and report.targets * per_s),
            },
        )

    def _write(self, kind: str, state: RunState, values: Mapping[str, Any]) -> None:
        epoch = self._extent.passes(state)
        self._recorder.write({"kind": kind, "global_step": state.step, "epoch": epoch, **values})
