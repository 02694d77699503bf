"""python -m tests.harness [options] [arguments for pytest]: the serial tests, then the MPI tests at several sizes."""

import argparse
import signal
import sys
from collections import Counter

from tests.harness.records import FAILED, PASSED, SKIPPED
from tests.harness.suite import Result, run_suite


def main() -> int:
    """Run everything, print a table, and return 1 if anything failed."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that running jobs are ended
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in what it starts in the background
    options, arguments = _parser().parse_known_args()
    results = []
    for ranks in ([] if options.no_serial else [0]) + options.ranks:
        result = Result(ranks)
        _say(f"\n==== {result.name} ====\n")
        results.append(run_suite(ranks, arguments, options.limit_s, options.test_limit_s, _say))
    _say(table(results))
    return int(any(result.failures for result in results) or not any(result.outcomes for result in results))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.harness", description=__doc__)
    parser.add_argument(
        "--ranks",
        type=lambda text: [int(word) for word in text.replace(",", " ").split()],
        default=[1, 2, 3, 4, 6, 8],
        help="numbers of ranks for the MPI tests (default 1,2,3,4,6,8)",
    )
    parser.add_argument("--no-serial", action="store_true", help="leave the serial tests out")
    parser.add_argument("--limit-s", type=float, default=1200, help="seconds for one number of ranks (default 1200)")
    parser.add_argument("--test-limit-s", type=float, default=60, help="seconds for one MPI test (default 60)")
    return parser


def table(results: list[Result]) -> str:
    """Return the totals, the failures, and why tests were skipped."""
    lines = ["", "==== total ===="]
    for result in results:
        counts = f"{result.count(PASSED):5d} passed, {result.count(FAILED):d} failed, {result.count(SKIPPED):d} skipped"
        lines.append(f"{result.name:>8}: {counts}  ({result.seconds:.1f} s)")
    reasons = Counter(reason for result in results for reason in result.reasons.values())
    lines += [f"skipped {count}: {reason}" for reason, count in reasons.most_common()]
    lines += [f"FAILED on {result.name}: {test}" for result in results for test in result.failures]
    passed, failed = (sum(result.count(outcome) for result in results) for outcome in (PASSED, FAILED))
    return "\n".join([*lines, f"{passed} passed, {failed} failed", ""])


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
