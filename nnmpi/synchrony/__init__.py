"""Who may go on when: the rules of synchronous and asynchronous training, with no MPI and no arrays.

    sync.Sync        which of the modes, with its settings; what does not fit together is refused here
    consistency      at a server: who waits, who may go on, and which part of which batch is next
    neighbours       who averages with whom in gossip
    staleness        how old the weights were that gradients were computed on
    slowdown         workers that are made slower on purpose

Nothing is imported here: import the module that defines the name.
"""
