"""The rules of synchronous and asynchronous training; no MPI and no arrays.

    sync.Sync        which of the modes, with its settings; a setting that the mode does not use is
                     refused here
    consistency      at the server: who waits, who may go on, which part of which batch is next;
                     stale gradients counted
    slow             ranks that are made slower on purpose

Nothing is imported here: import the module that defines the name.
"""
