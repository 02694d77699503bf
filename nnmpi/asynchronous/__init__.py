"""Training whose ranks need not wait for one another: a Trainer of its own.

    worker         AsynchronousWorker, and its couplings: the server's, local SGD, DiLoCo, gossip
    server         the parameter server: gradients and weights, at each rank's own pace
    consistency    its decisions: who waits, who continues, the next task (asp, ssp)
    averaging      weights averaged now and then; slowmo: with a slow momentum

The modes are `comm.synchrony.sync.Sync`'s. The core makes the trainer by its name in `base.wings`.
Nothing is imported here: import the module that defines the name.
"""
