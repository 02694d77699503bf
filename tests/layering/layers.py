"""The layers of the package, as a table, with the few exceptions and why they are there."""

# A module imports from lower layers; the rooms of one layer do not import one another.
LAYERS = (
    frozenset({"base"}),
    frozenset({"backend"}),
    frozenset({"tensor", "comm", "optim", "data", "metrics"}),
    frozenset({"schedule"}),  # whose command prices messages as comm's do
    frozenset({"ops"}),
    frozenset({"nn"}),
    frozenset({"models"}),
    frozenset({"memory"}),
    frozenset({"parallel"}),
    frozenset({"compose"}),
    frozenset({"train"}),
    frozenset({"commands"}),
    # the wings: the layers below import none of them
    frozenset({"asynchronous"}),
    frozenset({"lab"}),
    frozenset({"teaching"}),
    frozenset({"__main__"}),
)
WINGS = frozenset().union(*LAYERS[-4:-1])
# What reaches them by name: the tables, and the front door, for types.
DOORS = frozenset({"nnmpi/__init__.py", "nnmpi/base/wings.py", "nnmpi/commands/table.py"})
LAYER_OF = {part: number for number, parts in enumerate(LAYERS) for part in parts}

# What these parts do not import although it lies below them.
STRANGERS = {
    "schedule": frozenset({"backend"}),
    "nn": frozenset({"comm", "schedule", "optim"}),
    "models": frozenset({"comm", "schedule", "optim"}),
    "parallel": frozenset({"models"}),
}

# One strategy per file or folder, and none imports another, except a variant of another one.
STRATEGIES = frozenset(
    {
        "compressed",
        "data",
        "experts",
        "fixed_reduction",
        "fused",
        "pipeline",
        "sequence",
        "sharded",
        "summed",
        "tensor",
        "zero",
    }
)
VARIANTS = {
    "compressed": {"compressed", "summed"},
    "fixed_reduction": {"fixed_reduction", "data"},
    "fused": {"fused", "data"},
    "summed": {"summed", "data"},
    "zero": {"zero", "data"},
    "tensor": {"tensor", "sharded"},
}

# Libraries that only one folder knows.
HOMES = {
    "mpi4py": "comm/mpi",
    "cupy": "backend",
    "cudnn": "backend",
    "cupyx": "backend",
    "nvmath": "backend",
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
    "onnx",
    "h5py",
    "pyarrow",
    "tensorboardX",
    "tokenizers",
}
OPTIONAL |= {"cudnn", "cupy", "cupyx", "nvmath"}

# Methods that are explained once, in the base class.
INHERITED = frozenset({"forward", "backward"})
EXPLAINED = frozenset({"PlainKernels", "PrintedKernels"})  # base classes that explain each

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
        "nnmpi/comm/ranks.py",
        "nnmpi.comm.simulated.simulated_world",
    ): "of use with --simulate alone: 2 % of each start",
    ("nnmpi/train/run.py", "nnmpi.comm.simulated.simulated_world"): "of use to nnmpi.load alone",
    (
        "nnmpi/train/computing.py",
        "importlib.metadata",
    ): "it imports Python's email; a run that goes on needs neither",
}

# What may speak of options besides train and the layers above it.
SPEAKERS = frozenset({"nnmpi.base.command", "nnmpi.comm.ranks"})

# What library modules may write like options of nnmpi's own: those of other programs.
FOREIGN_FLAGS = {"--mpi": "srun's", "--shm-size": "docker's"}

# Who pickles all the same: objects of mpi4py's programs travel so, and stay in the process.
PICKLERS = frozenset({"nnmpi/teaching/mpi_front/modules.py"})

# Who uses the module json: the writer of files, and messages between ranks and processes.
WRITE_JSON = frozenset(
    {
        "nnmpi/base/files.py",
        "nnmpi/comm/agreement.py",
        "nnmpi/comm/mpi/watchdog.py",
        "nnmpi/parallel/pipeline/boundary.py",
        "nnmpi/teaching/exercise/wire.py",
    }
)

PICKLES = frozenset(
    {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
)
