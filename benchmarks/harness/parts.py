"""The command of a suite of several parts: it measures each, prints tables and missed marks, and
writes the results.

python benchmarks/SUITE [--parts A,B,...] [--check] [--results DIR] [--data-dir DIR]
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.harness import command, plots, results
from benchmarks.harness.command import Parser
from benchmarks.harness.machine import machine_facts
from benchmarks.harness.tables import rewrite
from nnmpi.base.errors import UsageError, raised_as

Content: TypeAlias = Mapping[str, Any]
"""A part's measurements, as in its JSON file."""

ATTEMPTS = 3  # of a part in a reduced run: other programs may have been busy


@dataclass(frozen=True)
class Part:
    """One part of a suite.

    Attributes:
        measure: (reduced, folder of data) -> the measurements.
        table: (content) -> its table, as Markdown.
        missed: (content) -> a sentence for each missed mark.
        timed: its marks are times, so a reduced run ignores them.
        draw: (folder, content) -> draws its pictures into the folder of results.
    """

    measure: Callable[[bool, Path | None], dict[str, Any]]
    table: Callable[[Content], str]
    missed: Callable[[Content], list[str]] = lambda content: []
    timed: bool = False
    draw: Callable[[Path, Content], None] | None = None


@dataclass(frozen=True)
class Suite:
    """A benchmark of several parts.

    Attributes:
        folder: of its README, `__main__` and results.
        description: for --help.
        parts: by name, in their order.
    """

    folder: Path
    description: str
    parts: Mapping[str, Part]

    @property
    def program(self) -> str:
        """The command."""
        return f"python benchmarks/{self.folder.name}"

    def main(self, words: Sequence[str] | None = None) -> int:
        """Run the command; return its exit status: 1 if a reduced run misses a mark.

        Args:
            words: of the command line; this process's if None.
        """
        return command.run(
            self.program, lambda: self._run(self._parse(sys.argv[1:] if words is None else words))
        )

    def _parse(self, words: Sequence[str]) -> argparse.Namespace:
        parser = Parser(self.program, description=self.description)
        names = ",".join(self.parts)
        text = (
            "folder for JSON files; in the suite's own folder results, its README's tables are"
            " rewritten too"
        )
        mnist = "folder of MNIST's files; without it they are downloaded where a part needs them"
        command.add_options(
            parser,
            ("--parts", command.list_of(command.one_of(*self.parts)), names, "what to measure"),
            ("--results", command.file, None, text),
            ("--data-dir", command.file, None, mnist),
        )
        text = "reduced: seconds, and no times worth keeping"
        parser.add_argument("--check", action="store_true", help=text)
        return parser.parse_args(words)

    def _run(self, options: argparse.Namespace) -> int:
        folder: Path | None = options.results
        if folder is not None:
            if any(self.parts[name].draw for name in options.parts):
                plots.check_can_draw("--results")
            with raised_as(UsageError, f"--results {folder} cannot be made", "give another folder"):
                folder.mkdir(parents=True, exist_ok=True)
        misses = 0
        for name in options.parts:
            part = self.parts[name]
            content = _measure(part, options)
            shown = f"{_machine(content)}\n\n{part.table(content)}"
            command.say(f"{name}: {shown}")
            if not (options.check and part.timed):
                missed = part.missed(content)
                misses += len(missed)
                command.say(
                    "\n".join([f"missed: {item}" for item in missed] or ["all marks are met"])
                )
            if folder is not None:
                self._write(folder, name, content, shown)
        return int(options.check and misses > 0)

    def _write(self, folder: Path, name: str, content: Content, shown: str) -> None:
        """Write a part's measurements and pictures; for the suite's own folder results, also its
        table in the README.
        """
        results.write(folder / f"{name}.json", content)
        draw = self.parts[name].draw
        if draw is not None:
            draw(folder, content)
        if folder.resolve() == (self.folder / "results").resolve():
            rewrite(self.folder / "README.md", {name: shown})


def _measure(part: Part, options: argparse.Namespace) -> Content:
    """Return a part's measurements; a reduced run that misses a mark is repeated."""
    content: Content = {}
    for _ in range(ATTEMPTS if options.check and not part.timed else 1):
        content = {"machine": machine_facts(), **part.measure(options.check, options.data_dir)}
        if not part.missed(content):
            break
    return content


def _machine(content: Content) -> str:
    if "mpi" not in content:
        return "Simulated, so the same on any machine."
    facts = content["machine"]
    return (
        f"Taken on {facts['date']}: {facts['cpu']}, {facts['cores']} cores, {facts['system']},"
        f" Python {facts['python']}, NumPy {facts['numpy']}, {content['mpi']}, {content['blas']}"
        " per rank."
    )
