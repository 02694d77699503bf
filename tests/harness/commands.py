"""Commands in this process."""

from nnmpi import simulate
from nnmpi.train.cli import without


def on_ranks(main, words, ranks=1, *more, **options):
    """Run a command on simulated ranks; return what its main function does on each."""
    given = words.split() if isinstance(words, str) else list(words)
    return simulate(lambda group: main(given, group), ranks, *more, **options)


def over(base, words):
    """Return a command line's words with others behind them, without the options that those give
    again: a command refuses an option with two values.
    """
    again = [word.partition("=")[0] for word in words.split() if word.startswith("--")]
    return " ".join([*without(again, base.split()), words])
