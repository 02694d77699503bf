"""Commands in this process."""

from nnmpi import simulate


def on_ranks(main, words, ranks=1, *more, **options):
    """Run a command on simulated ranks; return what its main function does on each."""
    given = words.split() if isinstance(words, str) else list(words)
    return simulate(lambda group: main(given, group), ranks, *more, **options)
