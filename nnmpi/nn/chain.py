"""A model as a chain of links that can be cut anywhere, and a part of such a chain as a module of its own.

    Sequential(conv, Residual(Sequential(a, b), shortcut), head)

        0: conv   |   1: open   1.body.0: a   1.body.1: b   1: close (+ 1.shortcut)   |   2: head
                      \\________________ kept as "1" _______________^

Sequences within sequences and residual blocks are opened, so that a cut may go through them; any other module is one
link. Where a cut leaves a kept value open, it travels beside the activation. Parameters keep the names that they have
in the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, TypeAlias

from nnmpi.errors import UsageError
from nnmpi.nn.container import Pop, Residual, Sequential, Stash, check_empty, fetch, keep
from nnmpi.nn.fuse import fuse
from nnmpi.nn.mode import current
from nnmpi.nn.module import Module
from nnmpi.tensor.parameter import Parameter

Kept: TypeAlias = dict[str, Any]
Run: TypeAlias = Callable[[Any, Kept], Any]


@dataclass(frozen=True)
class ChainLink:
    """One piece of a chain that is not cut.

    Attributes:
        name: the module's full name in the model.
        run: (x, kept) -> x; puts values that skip links into `kept` and takes them from there.
        members: the modules with parameters that it calls, with their full names.
        keeps: the name under which it keeps a value, or None.
        takes: the name of the kept value that it takes, or None.
        module: what it calls, when it does nothing else.
    """

    name: str
    run: Run
    members: tuple[tuple[str, Module], ...] = field(default=())
    keeps: str | None = None
    takes: str | None = None
    module: Module | None = None


def open_chain(model: Module) -> tuple[ChainLink, ...]:
    """Return the model's links in order, after giving every module its full name (`Module.path`).

    A model that is no sequence is one link.

    Raises:
        UsageError: when stashes and pops do not pair up.
    """
    model.name_modules()
    links = tuple(_links(model, ""))
    open_names: Kept = {}
    for link in links:
        if link.keeps is not None:
            keep(open_names, link.keeps, None)
        if link.takes is not None:
            fetch(open_names, link.takes)
    check_empty(open_names)
    return links


def kept_at(links: Sequence[ChainLink], cut: int) -> tuple[str, ...]:
    """Return the names of the values that are kept between link cut - 1 and link `cut`, sorted."""
    names: set[str] = set()
    for link in links[:cut]:
        if link.keeps is not None:
            names.add(link.keeps)
        if link.takes is not None:
            names.discard(link.takes)
    return tuple(sorted(names))


def _links(module: Module, path: str) -> Iterator[ChainLink]:
    inside = f"{path}." if path else ""
    if type(module) is Sequential:
        for name, layer in module.children():
            if isinstance(layer, Stash):
                yield _keeper(inside + name, inside + layer.name)
            elif isinstance(layer, Pop):
                yield _taker(inside + name, inside + layer.name, layer, ((inside + name, layer),))
            else:
                yield from _links(layer, inside + name)
    elif type(module) is Residual:
        start = f"{path} (start)"
        shortcut = () if module.shortcut is None else ((f"{inside}shortcut", module.shortcut),)
        yield _keeper(path, start)
        yield from _links(module.body, f"{inside}body")
        yield _taker(path, start, module.close, shortcut)
    else:
        yield ChainLink(path, lambda x, kept: module(x), ((path, module),), module=module)


def _keeper(path: str, name: str) -> ChainLink:
    def run(x: Any, kept: Kept) -> Any:
        keep(kept, name, x)
        return x

    return ChainLink(path, run, keeps=name)


def _taker(path: str, name: str, join: Callable[[Any, Any], Any], members: tuple[tuple[str, Module], ...]) -> ChainLink:
    return ChainLink(path, lambda x, kept: join(x, fetch(kept, name)), members, takes=name)


class ModelPart(Module):
    """Some links of a chain, as a model whose parameters have the names that they have in the whole one.

    Args:
        model: the whole model, whose modules this part goes on using.
        links: the links; of `open_chain(model)`.

    Attributes:
        links: as given.

    Raises:
        UsageError: from `forward`, when kept values are open at the ends.
    """

    def __init__(self, model: Module, links: Sequence[ChainLink]) -> None:
        self.links = tuple(links)
        self._joined = join_links(links)
        self._whole = list(model.named_parameters())
        self._names = {id(parameter): name for name, parameter in self._whole}

    def children(self) -> Iterator[tuple[str, Module]]:
        """Yield the links' modules with their full names; one that stands in several places by each of them."""
        for link in self.links:
            yield from link.members

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield the parameters by their names in the whole model, also those that it shares with other parts."""
        for _, parameter in super().named_parameters():
            yield self._names[id(parameter)], parameter

    def whole_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield the whole model's parameters. See `Module.whole_parameters`."""
        yield from self._whole

    def name_modules(self) -> None:
        """Leave the names as `open_chain` gave them."""

    def forward(self, x: Any) -> Any:
        """Return the last link's result for the first one's input."""
        kept: Kept = {}
        x = run_links(self.links, self._joined, x, kept)
        check_empty(kept)
        return x


def whole_pieces(model: Module, links: Sequence[ChainLink]) -> list[Module]:
    """Return some links of a chain as modules through which one tensor passes after the other.

    Args:
        model: the model that has the links' parameters.
        links: of `open_chain`; what skips some of them becomes one module with these.

    Raises:
        UsageError: when kept values are open at the ends.
    """
    pieces, run, open_names = list[Module](), list[ChainLink](), set[str]()
    for link in links:
        run.append(link)
        open_names = (open_names | {link.keeps or ""}) - {""}
        if link.takes is not None and link.takes not in open_names:
            break
        open_names -= {link.takes or ""}
        if not open_names:
            pieces.append(link.module if len(run) == 1 and link.module is not None else ModelPart(model, run))
            run = []
    if run:
        raise UsageError(
            f"a stage of the pipeline begins or ends within the shortcut of {run[0].name}, where more than one tensor "
            "passes, so that its activations cannot be limited; cut elsewhere with split, or leave the limit out"
        )
    return pieces


def join_links(links: Sequence[ChainLink]) -> tuple[Run, ...]:
    """Return the calls that run some links: one for several of them, where `nn.fuse` computes them as one."""
    runs: list[Run] = []
    for plain, group in groupby(links, lambda link: link.module is not None):
        if plain:
            runs += [partial(_alone, call) for call in fuse([link.module for link in group if link.module is not None])]
        else:
            runs += [link.run for link in group]
    return tuple(runs)


def run_links(links: Sequence[ChainLink], joined: Sequence[Run], x: Any, kept: Kept) -> Any:
    """Return the result of some links; `kept` holds what earlier links kept, and then what later ones will take.

    Args:
        joined: the links' `join_links`, which run unless the mode wants every module by itself.
    """
    for run in joined if current().joins else [link.run for link in links]:
        x = run(x, kept)
    return x


def _alone(call: Callable[[Any], Any], x: Any, kept: Kept) -> Any:
    """Run something that keeps nothing."""
    return call(x)


def cut_chain(links: Sequence[ChainLink], cuts: Sequence[range]) -> tuple[tuple[ChainLink, ...], ...]:
    """Return the links of each stage.

    Raises:
        UsageError: when the ranges are not all links in order, none empty.
    """
    flat = [i for cut in cuts for i in cut]
    if flat != list(range(len(links))) or not all(len(cut) for cut in cuts):
        raise UsageError(
            f"the cuts {list(cuts)} do not go through all {len(links)} links in order, each with at least one"
        )
    return tuple(tuple(links[i] for i in cut) for cut in cuts)
