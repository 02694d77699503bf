"""The rules of Chrome's trace format, as far as nnmpi uses it: for the tests of everything that
writes one.
"""

from collections import defaultdict

KEYS = {
    "X": {"ph", "name", "cat", "pid", "tid", "ts", "dur"},
    "M": {"ph", "name", "pid", "tid", "args"},
    "C": {"ph", "name", "pid", "ts", "args"},  # a curve of a process
    "s": {"ph", "name", "cat", "pid", "tid", "ts", "id"},
    "f": {"ph", "name", "cat", "pid", "tid", "ts", "id", "bp"},
}
ABOUT = {"process_name": "name", "thread_name": "name", "process_sort_index": "sort_index"} | {
    "thread_sort_index": "sort_index"
}


def breaches(trace):
    """Return what is wrong with a trace, in sentences; [] when nothing is."""
    rows = trace["traceEvents"]
    wrong = [
        f"{row}: keys"
        for row in rows
        if KEYS.get(row["ph"], set()) != set(row) - {"args"} | _args(row)
    ]
    wrong += [
        f"{row}: pid and tid are numbers"
        for row in rows
        if not _whole(row["pid"]) or not _whole(row.get("tid", 0))
    ]
    wrong += [f"{row}: a time" for row in rows if row.get("ts", 0) < 0 or row.get("dur", 0) < 0]
    wrong += [
        f"{row}: what it is about"
        for row in rows
        if row["ph"] == "M" and set(row["args"]) != {ABOUT[row["name"]]}
    ]
    return wrong + _nesting(rows) + _named(rows) + _arrows(rows)


def names(trace, what):
    """Return (pid, tid) -> name, of "process_name" or "thread_name"."""
    return {
        (row["pid"], row["tid"]): row["args"]["name"]
        for row in trace["traceEvents"]
        if row["name"] == what
    }


def spans(trace):
    """Return (pid, track, name, begin, end) of all events, in microseconds."""
    tracks = names(trace, "thread_name")
    return [
        (row["pid"], tracks[row["pid"], row["tid"]], row["name"], row["ts"], row["ts"] + row["dur"])
        for row in trace["traceEvents"]
        if row["ph"] == "X"
    ]


def standing(trace, rank):
    """Return the microseconds of a rank in which it computed, exchanged, waited; and of any of
    them, each counted once.

    Bars of a track may lie within one another. Sums that are under way beside it are no part of
    that.
    """
    kinds = {"compute": "compute", "waiting": "waiting"} | dict.fromkeys(
        ("send", "receive", "reduce"), "exchange"
    )
    bars = defaultdict[str, list[tuple[float, float]]](list)
    for pid, track, _, begin, end in spans(trace):
        kind = kinds.get(track.partition(" ")[0])
        if pid == rank and kind:
            bars[kind].append((begin, end))
            bars["all"].append((begin, end))
    result = {}
    for kind, those in bars.items():
        covered, until = 0.0, 0.0
        for begin, end in sorted(those):
            covered += max(0.0, end - max(begin, until))
            until = max(until, end)
        result[kind] = covered
    return result


def arrows(trace):
    """Return the names of the events that each arrow joins."""
    ends = defaultdict(dict)
    for row in trace["traceEvents"]:
        if row["ph"] in ("s", "f"):
            ends[row["id"]][row["ph"]] = _around(trace["traceEvents"], row)[-1]["name"]
    return sorted((end["s"], end["f"]) for end in ends.values())


def _args(row):
    return {"args"} if row["ph"] in ("M", "C") and "args" in row else set()


def _whole(value):
    return isinstance(value, int) and not isinstance(value, bool)


def _ns(microseconds):
    return round(microseconds * 1000)


def _nesting(rows):
    """Two events of a thread are apart, or one lies within the other."""
    wrong = []
    threads = defaultdict(list)
    for row in rows:
        if row["ph"] == "X":
            begin = _ns(row["ts"])
            threads[row["pid"], row["tid"]].append((begin, begin + _ns(row["dur"]), row["name"]))
    for thread, events in threads.items():
        for i, (begin, end, name) in enumerate(events):
            for other_begin, other_end, other in events[:i]:
                apart = end <= other_begin or other_end <= begin
                within = (other_begin <= begin and end <= other_end) or (
                    begin <= other_begin and other_end <= end
                )
                if not apart and not within:
                    wrong.append(f"{other} and {name} overlap on {thread}")
    return wrong


def _named(rows):
    """Every process and thread has one name and one place."""
    wrong = []
    about = [
        (row["name"], row["pid"], row["tid"] if row["name"].startswith("thread") else 0)
        for row in rows
        if row["ph"] == "M"
    ]
    wrong += [f"{item} is said twice" for item in set(about) if about.count(item) > 1]
    for row in rows:
        if row["ph"] != "M":
            about_it = [what for what in ABOUT if row["ph"] != "C" or what.startswith("process")]
            needed = {
                (what, row["pid"], 0 if what.startswith("process") else row["tid"])
                for what in about_it
            }
            wrong += [f"{row}: {item} is missing" for item in needed - set(about)]
    return wrong


def _arrows(rows):
    """Every arrow has one beginning and one end, both inside an event, with one name and
    category.
    """
    wrong = []
    ends = defaultdict(list)
    for row in rows:
        if row["ph"] in ("s", "f"):
            ends[row["id"]].append(row)
            if not _around(rows, row):
                wrong.append(f"{row}: an arrow's end outside of all events")
    for number, both in ends.items():
        if (
            sorted(row["ph"] for row in both) != ["f", "s"]
            or len({(row["name"], row["cat"]) for row in both}) != 1
        ):
            wrong.append(f"arrow {number} is {both}")
    return wrong


def _around(rows, end):
    """Return the events around an arrow's end, the outermost first; one that ends at that time is
    not around it.
    """
    at = _ns(end["ts"])
    around = [
        row
        for row in rows
        if row["ph"] == "X"
        and (row["pid"], row["tid"]) == (end["pid"], end["tid"])
        and (
            _ns(row["ts"]) <= at < _ns(row["ts"]) + _ns(row["dur"])
            or (_ns(row["ts"]) == at and row["dur"] == 0)
        )
    ]
    return sorted(around, key=lambda row: -row["dur"])
