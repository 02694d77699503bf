"""Run the corpus of bad inputs, or some of it; see `tests.corpus.bad`."""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.corpus.bad import failures


def main():
    """Print each failure; return 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=5000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    found = 0
    with tempfile.TemporaryDirectory() as place:
        for text in failures(given.first, given.count, given.seed, Path(place).resolve()):
            print(text, flush=True)
            found += 1
    print(f"{given.count} bad inputs, {found} failures")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
