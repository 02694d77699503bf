"""The rules of synchronous and asynchronous training; no MPI and no arrays.

    sync.Sync        the mode, with its settings; a setting that the mode does not use is refused
                     here
    slow             ranks that are slowed down on purpose

Nothing is imported here: import the module that defines the name.
"""
