"""`python -m nnmpi.verify`: train under the layout, train on rank 0 alone, compare, and print a table."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from nnmpi.comm.agreement import agreed
from nnmpi.comm.group import Group
from nnmpi.comm.mpi.start import start
from nnmpi.command import Console, HelpAsked
from nnmpi.compose.layout import Layout
from nnmpi.data.dataset import Dataset
from nnmpi.train.build import build_layout
from nnmpi.train.computing import explained, take_backend
from nnmpi.verify.compare import Finding, compare
from nnmpi.verify.options import Options, parse
from nnmpi.verify.trial import EPS, Trial, load_samples, microbatches, run


def main(words: Sequence[str], group: Group) -> bool:
    """Verify what the words say, and print what was found; return whether all is equal. Collective.

    Raises:
        UsageError: on all ranks, for wrong options, and a model or layout that does not fit.
        NnmpiError: for everything else that has a sentence.
    """
    console = Console(quiet=not group.is_root)
    try:
        options = parse(words)
    except HelpAsked as asked:
        console.say(str(asked))
        return True
    with agreed(group):
        dataset = load_samples(options)
        layout = build_layout(options.parallel, options.optimization, options.model)
    backend = take_backend(options.trial.backend, group, group.local_rank())
    with explained(backend):
        ours = run(options, dataset, group, layout, backend)
        place = [f"backend {backend.name} on {backend.device}"] if backend.is_device else []
        console.say(*_header(options, dataset, ours), *place, "")
        alone = group.split(group.rank)
        serial = run(options, dataset, alone, _serial(layout), backend) if group.is_root else None
        alone.free()
    findings = _share(group, None if serial is None else _compare(options, dataset, ours, serial))
    console.say(*table(findings), "", verdict(findings))
    return all(finding.holds for finding in findings)


def _serial(layout: Layout) -> Layout:
    """Return the layout of one rank that adds up gradients as the other does."""
    near = replace(layout, activation_memory=None, offload=None, offload_state=None)  # first: it wants the stage
    plain = replace(near, schedule="1f1b", virtual_stages=1, split="auto", memory_limit=None, zero=0)
    return replace(plain, dp=1, pp=1, tp=1, sp=1)


def _compare(options: Options, dataset: Dataset, ours: Trial, serial: Trial) -> list[Finding]:
    batch = options.optimization.batch_size
    samples = len(dataset) if batch == "full" else batch
    exact = options.parallel.reduction == "fixed"
    return compare(ours, serial, options.trial.dtype, samples, exact)


def _share(group: Group, findings: list[Finding] | None) -> list[Finding]:
    """Return rank 0's findings on all ranks."""
    values: list[list[Any]] = group.share(
        None if findings is None else [list(vars(each).values()) for each in findings]
    )
    return [Finding(*each) for each in values]


def _header(options: Options, dataset: Dataset, ours: Trial) -> list[str]:
    parameters = sum(array.size for array in ours.weights.values())
    batch = options.optimization.batch_size
    return [
        f"model {options.model.model}, {parameters:,} parameters, {options.trial.dtype}; "
        f"{_optimizer(options.optimization.optimizer)}",
        f"data {dataset.name}, {len(dataset)} samples of shape {dataset.sample_shape}, in batches of {batch}; "
        f"microbatches of each: {microbatches(options, dataset)}",
        f"reduction {options.parallel.reduction}, activation memory {options.parallel.activation_memory or 'any'}, "
        f"pipeline {options.parallel.pipeline}, allreduce {options.parallel.allreduce}",
        *ours.layout,
    ]


def _optimizer(name: str) -> str:
    return f"{name}, eps {EPS}" if name in ("adam", "adamw") else name


def table(findings: Sequence[Finding]) -> list[str]:
    """Return the findings as a table, a line each."""
    rows = [("compared with one rank", "largest error", "tolerance", "")]
    for each in findings:
        result = "bitwise" if each.bitwise else "equal" if each.holds else "DIFFERS"
        if not each.bitwise and each.where:
            result += f"   (most: {each.where})"
        rows.append((each.what, f"{each.error:.2g}", f"{each.tolerance:.2g}" if each.tolerance else "none", result))
    first = max(len(row[0]) for row in rows)
    return [f"{what:<{first}}  {error:>13}  {limit:>9}  {result}".rstrip() for what, error, limit, result in rows]


def verdict(findings: Sequence[Finding]) -> str:
    """Return what it comes to."""
    wrong = [each for each in findings if not each.holds]
    if not wrong:
        exact = all(each.bitwise for each in findings[:-1])
        return "equal to the last bit" if exact else "equal within the tolerance"
    return f"NOT EQUAL: {', '.join(each.what for each in wrong)}"


if __name__ == "__main__":
    sys.exit(0 if main(sys.argv[1:], start()) else 1)
