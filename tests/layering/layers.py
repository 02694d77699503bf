"""The layers of the package, as a table, with the few exceptions and why they are there."""

# A module imports from lower layers; the parts of one layer do not import one another, except in
# layer 0.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset(
        {
            "errors",
            "files",
            "shard",
            "threads",
            "launcher",
            "launching",
            "clock",
            "timeline",
            "command",
            "custom",
            "pages",
            "reading",
            "units",
            "version",
        }
    ),
    frozenset({"backend"}),
    frozenset({"tensor", "comm", "synchrony", "optim", "data"}),
    frozenset({"schedule"}),  # whose command prices messages as comm's do
    frozenset({"ops", "mesh"}),
    frozenset({"nn"}),
    frozenset({"models"}),
    frozenset({"memory"}),
    frozenset({"parallel"}),
    frozenset({"compose"}),
    frozenset({"train"}),
    frozenset({"verify"}),
    frozenset(
        {
            "generate",
            "evaluate",
            "plan",
            "predict",
            "export",
            "doctor",
            "exercise",
            "report",
            "simrun",
            "__main__",
        }
    ),
    frozenset({"run", "speedup", "grade"}),
)
LAYER_OF = {part: number for number, parts in enumerate(LAYERS) for part in parts}

# What these parts do not import although it lies below them.
STRANGERS: dict[str, frozenset[str]] = {
    "schedule": frozenset({"backend"}),
    "nn": frozenset({"comm", "schedule", "mesh", "optim"}),
    "models": frozenset({"comm", "schedule", "mesh", "optim"}),
    "parallel": frozenset({"models"}),
}

# One strategy per file or folder, and none imports another.
STRATEGIES = frozenset(
    f"nnmpi.parallel.{name}" for name in ("data", "server", "averaging", "tensor", "pipeline")
)

# Libraries that only one folder knows.
HOMES = {
    "mpi4py": "comm/mpi",
    "cupy": "backend",
    "cupyx": "backend",
    "cupy_backends": "backend",
    "numba": "backend",
    "llvmlite": "backend",
}

# Libraries that a user may not have: imported where they are needed. (Python has fcntl on POSIX
# only.)
OPTIONAL = {
    "PIL",
    "fcntl",
    "filelock",
    "matplotlib",
    "ml_dtypes",
    "pooch",
    "tensorboardX",
    "tokenizers",
}
OPTIONAL |= {"cupy", "cupy_backends", "cupyx"}

# Methods that are explained once, in the base class.
INHERITED = frozenset({"forward", "backward"})

# Imports inside functions that are not of an optional library.
LATE_IMPORTS = {
    (
        "nnmpi/backend/kernels.py",
        "nnmpi.backend.jit.kernels",
    ): "it imports numba, which a user may not have",
    (
        "nnmpi/comm/group.py",
        "nnmpi.comm.mpi.mpi_world",
    ): "it imports mpi4py.MPI, for a communicator of mpi4py's",
    (
        "nnmpi/comm/collective.py",
        "nnmpi.comm.render",
    ): "it imports collectives; of use in notebooks alone",
    (
        "nnmpi/schedule/schedule.py",
        "nnmpi.schedule.render",
    ): "it imports schedules; of use in notebooks alone",
    (
        "nnmpi/comm/mpi/start.py",
        "mpi4py",
    ): "without an MPI library it raises, which becomes a sentence there",
    (
        "nnmpi/comm/mpi/start.py",
        "mpi4py.MPI",
    ): "without an MPI library it raises, which becomes a sentence there",
    (
        "nnmpi/comm/mpi/start.py",
        "nnmpi.comm.mpi.mpi_world",
    ): "it imports mpi4py.MPI, which must have been loaded by then",
    (
        "nnmpi/train/cli.py",
        "nnmpi.comm.simulated.simulated_world",
    ): "of use with --simulate alone: 2 % of each start",
    ("nnmpi/train/run.py", "nnmpi.comm.simulated.simulated_world"): "of use to nnmpi.load alone",
    (
        "nnmpi/train/computing.py",
        "importlib.metadata",
    ): "it imports Python's email; a run that goes on needs neither",
    (
        "nnmpi/train/loop.py",
        "nnmpi.train.auto_layout",
    ): "the planner, of use with --layout auto alone",
}

# What may speak of options besides train and the layers above it.
OF_COMMANDS = frozenset({"command", "launching"})

# What library modules may write like options of nnmpi's own: those of other programs.
FOREIGN_FLAGS = {
    "--mpi": "srun's",
    "--shm-size": "docker's",
}

# Who pickles all the same: objects of mpi4py's programs travel so, and stay in the process.
PICKLERS = frozenset({"nnmpi/teaching/mpi_front.py"})

PICKLES = frozenset(
    {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
)
