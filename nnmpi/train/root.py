"""Work that rank 0 does for all: the others get its result, or raise its error."""

from collections.abc import Callable
from typing import Any

import nnmpi.errors as errors
from nnmpi.comm.group import Group
from nnmpi.errors import NnmpiError


def on_root(group: Group, work: Callable[[], Any]) -> Any:
    """Return what `work` returns on rank 0, a JSON value, on every rank. Collective.

    Unlike `agreed`, the text of an error does not name rank 0: that it did the work for all is nothing to the user.

    Raises:
        NnmpiError: on all ranks, of the kind and with the text and exit status that `work` raised on rank 0. Any other
            exception is raised on rank 0 alone, and ends the job with its traceback.
    """
    answer: dict[str, Any] = {}
    if group.is_root:
        try:
            answer = {"result": work()}
        except NnmpiError as error:
            answer = {"kind": type(error).__name__, "text": str(error), "status": error.exit_status}
    answer = group.share(answer)
    if "result" in answer:
        return answer["result"]
    kind: type[NnmpiError] = getattr(errors, answer["kind"], NnmpiError)
    failure = kind(answer["text"])
    failure.exit_status = answer["status"]
    raise failure
