"""What everything stands on: errors, files, units, clocks, options of commands; no arrays.

No file needs another one to be read first. What a user meets:

    errors         every error that a command turns into a sentence and a status
    lines          the user's lines in an error or a stack
    words          what to write instead of names of PyTorch, Keras, Horovod and others
    glossary       names explained, for help texts
    units          times and sizes with their units
    picture        bars and arrows as text and SVG

A command from its start to its end:

    version        which nnmpi this is
    launcher       the launcher's variables: rank and size before MPI starts
    early          signals before a command has handlers of its own
    command        options, help, and output of one rank only
    custom         user code by FILE.py:NAME
    files          files that are written whole or not at all
    ending         errors that no caller can be told

What objects are made of:

    clock          time and sleeping, of the computer or of a simulated rank
    timeline       events of a rank, as Perfetto opens them
    shard          which rank owns which indices
    loop           the place of a training in its data
    ownership      which simulated rank an object belongs to
    settled        objects to which nothing is written that they would ignore
    wings          what is built on the core, by name
"""
