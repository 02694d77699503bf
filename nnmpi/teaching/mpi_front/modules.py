"""The modules `mpi4py` and `mpi4py.MPI` of a simulated rank."""

import pickle
import platform
import threading
from contextlib import nullcontext
from functools import partial
from importlib.machinery import PathFinder
from math import prod
from types import ModuleType
from typing import Any

from nnmpi.teaching.mpi_front import (
    communicators,
    datatypes,
    handles,
    messages,
    reductions,
    requests,
    windows,
)
from nnmpi.teaching.mpi_front.communicators import Intracomm
from nnmpi.teaching.mpi_front.datatypes import DATATYPES, Datatype, buffer
from nnmpi.teaching.mpi_front.handles import (
    ERRORS,
    Exception,
    FrontGroup,
    Info,
    as_int,
    refuse,
)
from nnmpi.teaching.mpi_front.messages import Wire
from nnmpi.teaching.mpi_front.reductions import OPS, Op
from nnmpi.teaching.mpi_front.requests import Message, Request

TICK_S = 1e-7  # simulated seconds of a call of Wtime, so that no two times are equal
VERSION, LIBRARY = (4, 1), "nnmpi, simulated ranks"
_LEVEL_NAMES = ("THREAD_SINGLE", "THREAD_FUNNELED", "THREAD_SERIALIZED", "THREAD_MULTIPLE")
LEVELS = {name: number for number, name in enumerate(_LEVEL_NAMES)}
_KEYS = {"TAG_UB": 2**31 - 1, "HOST": handles.PROC_NULL, "IO": handles.ANY, "WTIME_IS_GLOBAL": 1}
_SAME = {
    handles: "ANY_SOURCE ANY_TAG PROC_NULL ROOT UNDEFINED IDENT CONGRUENT SIMILAR UNEQUAL Group"
    " Info Exception",
    datatypes: "Datatype buffer",
    reductions: "Op",
    messages: "BOTTOM IN_PLACE",
    requests: "Status Request Prequest Grequest Message",
    windows: "Win",
    communicators: "Comm Intracomm Intercomm Topocomm Cartcomm Graphcomm Distgraphcomm GRAPH CART"
    " DIST_GRAPH UNWEIGHTED WEIGHTS_EMPTY BUFFER_AUTOMATIC",
}


class Pickle:
    """How objects become bytes: `dumps`, `loads`."""

    def __init__(self, dumps=None, loads=None, protocol=None):
        given = pickle.dumps if dumps is None else dumps
        if dumps is None and protocol is None:
            protocol = pickle.HIGHEST_PROTOCOL
        self.PROTOCOL = protocol
        self.dumps = given if protocol is None else lambda value: given(value, protocol)
        self.loads = pickle.loads if loads is None else loads

    def dumps_oob(self, value):
        """Return bytes, and the buffers that lie beside them."""
        beside: list[pickle.PickleBuffer] = []
        data = pickle.dumps(value, 5, buffer_callback=beside.append)
        return data, [buffer.frombuffer(item.raw()) for item in beside]

    def loads_oob(self, data, beside):
        """Return the object again."""
        return pickle.loads(data, buffers=beside)


def find_class(code):
    """Return the class of an error: its code itself."""
    if not 0 <= code < len(ERRORS):
        raise Exception("ERR_ARG", f"{code} is no code of an error")
    return code


def allocate(size, info=None):
    """Return new memory."""
    if size < 0:
        raise Exception("ERR_ARG", f"there is no memory of {size} bytes")
    return buffer.allocate(size, True)


def find_dims(nnodes, dims):
    """Return the lengths of a grid of ranks, as equal as possible; those above 0 are kept."""
    nnodes = as_int(nnodes)
    if isinstance(dims, int):
        if dims < 0:
            raise ValueError(f"a grid cannot have {dims} axes")
        dims = [0] * dims
    dims = [*dims]
    if nnodes < 1:
        raise Exception("ERR_DIMS", f"{nnodes} ranks are no grid of {dims}")
    known = prod(length or 1 for length in dims)
    if min(dims, default=0) < 0 or nnodes % known or (0 not in dims and nnodes != known):
        raise Exception("ERR_DIMS", f"{nnodes} ranks are no grid of {dims}")
    left = nnodes
    for length in dims:
        left //= length or 1
    free, made = dims.count(0), []
    for axis in range(free, 0, -1):
        least = next(n for n in range(1, left + 1) if left % n == 0 and n**axis >= left)
        made.append(least)
        left //= least
    made.sort(reverse=True)
    return [length or made.pop(0) for length in dims]


# mpi4py.rc; a simulation uses `initialize` and `finalize` alone
_SETTINGS = {
    "initialize": True,
    "threads": True,
    "thread_level": "multiple",
    "finalize": None,
    "fast_reduce": True,
    "recv_mprobe": True,
    "irecv_bufsz": 32768,
    "errors": "exception",
}


class Settings(ModuleType):
    """The module `mpi4py.rc`, which is called with settings, too."""

    def __call__(self, **settings):
        for name in settings.keys() - _SETTINGS.keys():
            raise TypeError(f"mpi4py.rc has no {name!r}; it has {', '.join(_SETTINGS)}")
        vars(self).update(settings)


class Life:
    """Whether MPI is initialized and finalized on a rank.

    Args:
        rc: the settings; mpi4py initializes MPI when it is imported, unless they say otherwise.
        barrier: waits for all ranks.
    """

    def __init__(self, rc, barrier):
        self._rc, self._barrier = rc, barrier
        self._is_begun = self.is_over = False

    def is_begun(self):
        """Return whether MPI is initialized."""
        return self._is_begun or self._rc.initialize

    def begin(self):
        """Initialize MPI.

        Raises:
            Exception: if it is, or was.
        """
        if self.is_begun() or self.is_over:
            raise Exception(
                "ERR_OTHER", "MPI is initialized, by the import of mpi4py.MPI or before"
            )
        self._is_begun = True

    def end(self):
        """Finalize MPI, when all ranks do.

        Raises:
            Exception: if it is not initialized, or was finalized before.
        """
        if self.is_over or not self.is_begun():
            raise Exception("ERR_OTHER", "MPI is not initialized, or it is finalized")
        self._barrier()
        self.is_over = True


# what is the same on all ranks and in all runs
_CONSTANTS = {
    **{
        name: getattr(module, name if hasattr(module, name) else f"Front{name}")
        for module, all_ in _SAME.items()
        for name in all_.split()
    },
    **DATATYPES,
    **OPS,
    **{name: number for number, name in enumerate(ERRORS)},
    **LEVELS,
    **{name: number for number, name in enumerate([*_KEYS, "APPNUM", "UNIVERSE_SIZE"])},
    "memory": buffer,
    "Pickle": Pickle,
    "ERRORS_RETURN": "ERRORS_RETURN",
    "ERRORS_ARE_FATAL": "ERRORS_ARE_FATAL",
    "KEYVAL_INVALID": -1,
    "ORDER_C": 0,
    "ORDER_FORTRAN": 1,
    "ORDER_F": 1,
    "COMM_TYPE_SHARED": communicators.SHARED,
    "COMM_TYPE_HW_UNGUIDED": communicators.HW_UNGUIDED,
    "COMM_TYPE_HW_GUIDED": communicators.HW_GUIDED,
    "COMM_TYPE_RESOURCE_GUIDED": communicators.RESOURCE_GUIDED,
    "BSEND_OVERHEAD": 128,
    "MAX_PROCESSOR_NAME": 256,
    "VERSION": VERSION[0],
    "SUBVERSION": VERSION[1],
    "Wtick": lambda: TICK_S,
    "Get_version": lambda: VERSION,
    "Get_library_version": lambda: LIBRARY,
    "get_vendor": lambda: ("nnmpi", (0, 0, 0)),
    "Get_processor_name": platform.node,
    "Get_address": lambda buf: datatypes.find_bytes(buf)[0].__array_interface__["data"][0],
    "Get_error_string": lambda code: f"MPI_{ERRORS[find_class(code)]}",
    "Get_error_class": find_class,
    "Alloc_mem": allocate,
    "Free_mem": buffer.release,
    "Attach_buffer": communicators.attach,
    "Detach_buffer": communicators.detach,
    "Flush_buffer": lambda: None,
    "Compute_dims": find_dims,
    "Pcontrol": lambda level: None,
}


def make_modules(wire: Any) -> dict[str, ModuleType]:
    """Return a rank's replacements for mpi4py's modules, by name."""
    mpi, package, settings = ModuleType("mpi4py.MPI"), ModuleType("mpi4py"), Settings("mpi4py.rc")
    vars(settings).update(_SETTINGS)
    installed = PathFinder.find_spec("mpi4py")
    vars(package).update(
        MPI=mpi,
        rc=settings,
        # its parts in Python, such as mpi4py.util, if it is installed
        __path__=list(installed.submodule_search_locations or ()) if installed else [],
        __version__="4.1.2",
        __getattr__=partial(refuse, package),
    )
    vars(mpi).update(_CONSTANTS)
    vars(mpi).update(_objects(wire))
    vars(mpi).update(_functions(wire, mpi, Life(settings, wire.barrier)))
    return {"mpi4py": package, "mpi4py.MPI": mpi, "mpi4py.rc": settings}


def _objects(wire: Any) -> dict[str, Any]:
    """Return the objects of mpi4py.MPI that a rank has for itself: what it changes is its own."""
    rank = wire._local
    alone = Wire(wire._board, wire.world, rank, [rank.number], -1 - 2 * rank.number)
    wire.name, alone.name = "MPI_COMM_WORLD", "MPI_COMM_SELF"
    return {
        "_attributes": dict(enumerate([*_KEYS.values(), None, wire.size])),
        "_handles": [None],
        "_attached": None,
        "pickle": Pickle(),
        "COMM_WORLD": Intracomm._of(wire),
        "COMM_SELF": Intracomm._of(alone),
        "COMM_NULL": Intracomm(),
        "REQUEST_NULL": Request(),
        "MESSAGE_NULL": Message(),
        "MESSAGE_NO_PROC": Message._of((wire, None)),
        "GROUP_NULL": FrontGroup(),
        "GROUP_EMPTY": FrontGroup._made(()),
        "INFO_NULL": Info(),
        "WIN_NULL": windows.Win(),
        "OP_NULL": Op(),
        "DATATYPE_NULL": Datatype(),
        "_typedict": {item.tocode(): item for item in reversed(DATATYPES.values())},
    }


def _functions(wire: Any, mpi: ModuleType, life: Life) -> dict[str, Any]:
    """Return the functions of mpi4py.MPI that know their rank.

    Args:
        wire: of the rank.
        mpi: the module.
        life: of the rank.
    """
    main = threading.current_thread()

    def wtime():
        wire.world.sleep(TICK_S)
        return wire.world.now()

    def begin(required=0):
        life.begin()
        return LEVELS["THREAD_FUNNELED"]

    return {
        "Wtime": wtime,
        "Init": life.begin,
        "Init_thread": begin,
        "Query_thread": lambda: LEVELS["THREAD_FUNNELED"],
        "Is_thread_main": lambda: threading.current_thread() is main,
        "Is_initialized": life.is_begun,
        "Is_finalized": lambda: life.is_over,
        "Finalize": life.end,
        "Iflush_buffer": lambda: mpi.COMM_SELF.Iflush_buffer(),
        # what mpi4py.util.pkl5 takes of mpi4py
        "_comm_lock": lambda comm, name: nullcontext(),
        "_commctx_intra": lambda comm: (Intracomm._of(comm._wire.shadow()), 0),
        "_commctx_inter": lambda comm: refuse(mpi, "Intercomm.Create"),
        "__getattr__": partial(refuse, mpi),
    }
