"""mpi4py's calls on simulated ranks: `MPI` for programs that `nnmpi simrun` runs.

    handles         groups, errors, what all objects have in common
    datatypes       datatypes, memory, reductions
    messages        [buffer, counts, offsets, datatype]; which message a receive takes
    reductions      SUM, MAXLOC, the program's own
    requests        statuses, requests, matched messages
    communicators   messages, collectives, topologies
    windows         memory that the ranks of a node share
    scheduler       turns of the ranks: their lines, waits, and state of the interpreter
    modules         the modules that programs import

Messages match receives as in MPI: a receive may take any rank and any tag, and its buffer may be
longer. Where MPI leaves the choice of a message open, the clocks decide, or else the seed. Programs
pass arguments without types, so these modules have none, either; setup.cfg exempts them.
"""
