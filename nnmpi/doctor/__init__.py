"""`python -m nnmpi.doctor`: what has become of a run, and whether the machine is fit for one.

diagnosis     of a run's folder: what happened, and what to do, in a sentence each
machine       what each node has and how ranks lie on it; what of that is slow or wrong
selftest      every collective, shared memory, a pipeline and a checkpoint, on all ranks
"""
