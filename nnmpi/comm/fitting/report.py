"""A fit in words: the segments of each link with their alpha and beta, and what whole all-reduces take."""

from collections.abc import Iterator

from nnmpi.comm.algorithms.registry import ALGORITHMS, NATIVE, SHARED
from nnmpi.comm.fit import Fit
from nnmpi.comm.fitting.segments import segments
from nnmpi.comm.sizes import name_bytes, name_seconds
from nnmpi.errors import UsageError

EXAMPLES = (4, 1024, 2**14, 2**16, 2**18, 2**20, 2**22, 2**24, 2**26)


def describe_fit(fit: Fit) -> Iterator[str]:
    """Yield the lines that tell what was measured."""
    known = fit.facts
    nodes = len(set(known["nodes"]))
    where = "1 node" if nodes == 1 else f"{nodes} nodes"
    yield f"{fit.ranks} ranks on {where}, {known['mpi']}, {known.get('cpu', 'unknown processor')}"
    across = fit.machine.across
    links = {"inside a node" if across or fit.machine.nodes is None else "between nodes": fit.machine.inside}
    if across is not None and across != fit.machine.inside:
        links["between nodes"] = across
    cache_bytes = float(known.get("cache_bytes", 2**23)) / (2 * fit.ranks)
    for name, link in links.items():
        for way, curve in (("one way", link.one_way), ("both ways at once", link.both_ways)):
            yield f"messages {name}, {way}: alpha {name_seconds(curve.alpha_s)}"
            for part in segments(curve, cache_bytes):
                span = f"{name_bytes(int(part.start_bytes))} to {name_bytes(int(part.stop_bytes))}"
                step = f", {name_seconds(part.step_s)} for the handshake" if part.name == "rendezvous" else ""
                yield f"    {part.name + ',':13} {span}: beta {1e9 * part.beta_s:.3f} ns/B{_rate(part.beta_s)}{step}"
    add = fit.machine.add
    yield "adding: gamma " + ", ".join(
        f"{1e9 * add(nbytes) / nbytes:.3f} ns/B{_rate(add(nbytes) / nbytes)} for {name_bytes(nbytes)}"
        for nbytes in (2**16, 2**24)
    )


def predictions(fit: Fit, sizes: tuple[int, ...] = EXAMPLES) -> Iterator[str]:
    """Yield a table of what each all-reduce is predicted to take."""
    names = [NATIVE, *([SHARED] if fit.shared is not None else []), *ALGORITHMS]
    yield f"{'predicted':17}" + "".join(f"{name_bytes(nbytes):>11}" for nbytes in sizes)
    for name in names:
        yield f"{name:17}" + "".join(f"{_seconds(fit, name, nbytes):>11}" for nbytes in sizes)


def _rate(seconds_per_byte: float) -> str:
    return f" ({1e-9 / seconds_per_byte:.1f} GB/s)" if seconds_per_byte > 0 else ""


def _seconds(fit: Fit, name: str, nbytes: int) -> str:
    try:
        return name_seconds(fit.predict(name, nbytes), digits=3)
    except UsageError:
        return "-"
