"""JSON values as bytes on the wire: no pickle, so that a message can hold nothing but data."""

import json
from typing import Any

from nnmpi.errors import CommError


def encode(value: Any) -> bytes:
    """Return the value as JSON text; what JSON cannot hold becomes a complaint that `decode` raises at the other end.

    The sender must not raise: the other ranks are on their way into the exchange and would wait for it.
    """
    try:
        return json.dumps({"value": value}).encode()
    except (TypeError, ValueError, RecursionError) as error:
        return json.dumps({"error": f"{type(error).__name__}: {error}"}).encode()


def decode(text: bytes, rank: int) -> Any:
    """Return the value that `rank` encoded: lists for tuples, text for the keys of dictionaries, as JSON has it.

    Raises:
        CommError: when the value was none that JSON can hold; names the rank.
    """
    message = json.loads(text)
    if "error" in message:
        raise CommError(
            f"rank {rank} sent what is not a JSON value ({message['error']}); "
            "send None, bool, int, float, str, and lists and dictionaries of them"
        )
    return message["value"]
