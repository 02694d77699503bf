"""Who may go on when: the rules of synchronous and asynchronous training, with no MPI and no arrays.

    sync.Sync        which of the modes, with its settings; what does not fit together is refused here
    desk.Desk        at a server: who waits, who may go on (clocks.Clocks), which part of which batch is next
                     (dealer.Dealer)
    staleness        how old the weights were that gradients were computed on
    slowdown         workers that are made slower on purpose

Nothing is imported here: import the module that defines the name.
"""
