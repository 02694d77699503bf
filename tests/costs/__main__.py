"""Write what training costs now to `costs.json`, and print what has changed.

    python -m tests.costs                  all ways
    python -m tests.costs Worker "loop,"   those whose names contain one of these words

Commit the file with the change that made a way dearer or cheaper, and say in the message why.
"""

import sys
import warnings

from tests.costs import file
from tests.costs.count import cost_of
from tests.costs.ways import WAYS


def main(words):
    """Count, print and write."""
    versions, stored = file.read() if file.FILE.exists() else ({}, {})
    if versions != file.versions():
        words = []  # all of them: the others' numbers hold for other versions
    costs = {}
    for name, way in WAYS.items():
        if name in stored and words and not any(word in name for word in words):
            costs[name] = stored[name]
            continue
        cost, functions = cost_of(way)
        costs[name] = file.entry(cost, functions)
        before = stored.get(name, {})
        changes = [
            f"{kind} {before.get(kind, 'new')} -> {number}"
            for kind, number in cost.items()
            if number != before.get(kind)
        ]
        print(f"{name:40} {', '.join(changes) or 'as before'}", flush=True)
    file.write(costs)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1:])
