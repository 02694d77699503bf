"""The serial tests, and the MPI tests on several numbers of ranks.

Tests on simulated ranks (see `simulated`) are serial, too.

Without options, tests marked slow are left out, and most cases of a test that has many. MPI tests
of messages and collectives run on 2, 3 and 4 ranks, other MPI tests on one of these, dealt out by
name, and each simulated test on one of 12 numbers of ranks. Several runs go at once.

--all adds the slow tests, and of tests that cross parameters the cases in which all pairs of
values meet. MPI tests of messages and collectives then run on 1, 2, 3, 4, 6 and 8 ranks, the others
on one of these except 1. --rest runs only what --all adds.

Other arguments are pytest's (paths, -k, -x). With them the runs follow one another, print at once,
and leave nothing out.

--changed runs the test files that import what has changed since this branch left the main one, or
since --since REV, directly or by other modules; see `tests/harness/changed.py`. Slow tests are left
out. It is a filter for who is at work: the whole suite is run before a change is merged.

If several runs went at once, or with --again, a few failed tests are repeated by themselves. A test
that then passes is reported as unsteady, not as failed.

scripts/test --gpu first installs CuPy and CUDA's compiler. Without them, tests that need one are
skipped.
"""

import argparse
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path

from tests.harness import changed, left_out
from tests.harness.records import FAILED, LEFT_OUT, PASSED, SKIPPED
from tests.harness.suite import Suite, run_side_by_side

MOST_AGAIN = 10  # where more failed, something is broken


def main():
    """Run everything, print a table, and return 1 if anything failed."""
    # so that running jobs are ended
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    # a shell ignores it in what it starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
    options, arguments = _parser().parse_known_args()
    begin = time.monotonic()
    touched = []
    if options.changed or options.since:
        touched = _touched(options.since)
        if not touched:
            _say("no test file imports what has changed\n")
            return 0
    everything = options.all or options.rest
    quick = not everything and not arguments
    ranks = (
        options.ranks
        if options.ranks is not None
        else left_out.ALL_RANKS
        if everything
        else left_out.QUICK_RANKS
    )
    sizes = ([] if options.no_serial else [0]) + ranks
    # one more than cores, since a tenth of the time tests wait for something that sleeps
    lanes = options.jobs or (1 if arguments or options.no_serial else _cores() + 1)
    words = {
        size: [*left_out.options(size, ranks, everything, options.rest), *arguments, *touched]
        if touched or not arguments
        else arguments
        for size in sizes
    }
    suites = [
        # eight ranks on two busy cores take more than a minute for what four do in half of one
        Suite(size, words[size], options.limit_s, options.test_limit_s * max(1, size / 4), _say)
        for size in sizes
    ]
    if lanes > 1:
        _say(
            f"{lanes} runs at once; each prints when it has ended (--jobs 1: one after the other)\n"
        )
        run_side_by_side(suites, lanes, _say)
    else:
        for suite in suites:
            _say(f"\n==== {suite.name} ====\n")
            suite.run()
    if (options.again or lanes > 1) and sum(len(suite.failures) for suite in suites) <= MOST_AGAIN:
        for suite in suites:
            if suite.failures:
                suite.run_again()
    if options.slowest:
        _say(slowest(suites, options.slowest))
    _say(table(suites, time.monotonic() - begin))
    if quick:
        _say(
            "scripts/test --all runs what was left out, of crossed parameters all pairs, and MPI"
            " tests on 1, 6 and 8 ranks, too\n"
        )
    return int(
        any(suite.failures for suite in suites) or not any(suite.outcomes for suite in suites)
    )


def _touched(since):
    """Return the test files that a change touches, and say which."""
    root = Path(__file__).parents[2]
    try:
        files = changed.changed_since(root, since)
    except ValueError as error:
        raise SystemExit(f"scripts/test: {error}; give another commit") from None
    touched = changed.touched_tests(root, files)
    _say(f"{len(files)} changed files; {len(touched)} test files: {' '.join(touched)}\n")
    return touched


def _cores():
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _parser():
    parser = argparse.ArgumentParser(
        prog="scripts/test",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--all",
        action="store_true",
        help=(
            "slow tests, too, all pairs of parameters that a test crosses, and the MPI tests on 1,"
            " 2, 3, 4, 6 and 8 ranks"
        ),
    )
    add("--rest", action="store_true", help="only what --all adds")
    add("--changed", action="store_true", help="the test files that a change touches")
    add("--since", default="", metavar="REV", help="of --changed: the change since this commit")
    add(
        "--ranks",
        type=left_out.read_ranks,
        help="numbers of ranks for the MPI tests (default 2,3,4; '' for none)",
    )
    add("--no-serial", action="store_true", help="without the serial tests")
    add(
        "--jobs",
        type=int,
        help=(
            "runs at once (default: cores + 1; 1 where pytest gets arguments or --no-serial"
            " is given)"
        ),
    )
    add(
        "--again",
        action="store_true",
        help="repeat failed tests by themselves, also after one run at a time",
    )
    add(
        "--slowest",
        type=int,
        default=0,
        metavar="N",
        help="print the N tests that took most of the processors",
    )
    add("--limit-s", type=float, default=1800, help="seconds for one run (default 1800)")
    add(
        "--test-limit-s",
        type=float,
        default=60,
        help="seconds for one MPI test on up to 4 ranks (default 60)",
    )
    return parser


def slowest(suites, count):
    """Return the tests that took most processor time on all their ranks, and their share of all."""
    costs = sorted(
        ((cpu_s, suite.name, test) for suite in suites for test, cpu_s in suite.cpu_s.items()),
        reverse=True,
    )
    all_s, top = sum(cpu_s for cpu_s, *_ in costs), costs[:count]
    top_s = sum(cpu_s for cpu_s, *_ in top)
    return "\n".join(
        [
            "",
            f"==== the {len(top)} slowest tests: {top_s:.0f} s of {all_s:.0f} s of processors ====",
            *(f"{cpu_s:8.2f} s  {name:>7}  {test}" for cpu_s, name, test in top),
            "",
        ]
    )


def table(suites, seconds):
    """Return the totals, why tests were skipped or left out, and what failed with what."""
    lines, totals, why = (["", f"==== total ({seconds:.0f} s) ===="], Counter(), Counter())
    for suite in suites:
        counts = Counter(suite.outcomes.values())
        totals += counts
        why.update((suite.outcomes[test], reason) for test, reason in suite.reasons.items())
        words = (
            f"{suite.name:>8}: {counts[PASSED]:5d} passed, {counts[FAILED]} failed,"
            f" {counts[SKIPPED]} skipped"
        )
        words += f", {counts[LEFT_OUT]} left out" if counts[LEFT_OUT] else ""
        lines.append(f"{words}  ({suite.seconds:.1f} s)")
    for outcome in (SKIPPED, LEFT_OUT):
        lines += [
            f"{outcome} {count}: {reason}"
            for (result, reason), count in why.most_common()
            if result == outcome
        ]
    for suite in suites:
        again = [
            ("UNSTEADY (failed, and passed again by itself)", item)
            for item in suite.unsteady.items()
        ]
        failed = [("FAILED", (test, suite.reasons.get(test, ""))) for test in suite.failures]
        for word, (test, reason) in again + failed:
            lines.append(f"{word} on {suite.name}: {test}\n    {reason}".rstrip())
    return "\n".join([*lines, f"{totals[PASSED]} passed, {totals[FAILED]} failed", ""])


def _say(text):
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
