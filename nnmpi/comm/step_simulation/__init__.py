"""What happens when all ranks work their steps off, without MPI: the machinery behind `prove`, `simulate` and `render`.

engine    goes through all ranks' steps against a clock, message by message; what a message does is its caller's:
          `comm.prove` adds up who contributed, `comm.simulate` adds up seconds, `comm.render` writes pictures
costs     steps in bytes, and what messages and sums cost on a machine
links     the links between nodes, which messages wait for
rounds    a shortcut for symmetric phases: a whole round of thousands of ranks in a few sums over arrays

Read engine first. There is one more such engine in nnmpi, `schedule.engine`: a pipeline's programs have sends that do
not wait for their receiver, several messages under way, and computation beside them, while a collective's step is over
when both of its messages are.
"""
