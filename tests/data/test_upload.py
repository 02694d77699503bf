"""Copies of batches to a device are done before the memory under them is anybody else's."""

from __future__ import annotations

import gc

import pytest

from nnmpi.data.loader import Loader
from nnmpi.data.upload import Uploads, batches
from tests.device.library import device_backend, load
from tests.equivalence.reference import digits


def uploads(monkeypatch: pytest.MonkeyPatch) -> tuple[Uploads, list[int]]:
    """Return an epoch of uploads, and where the addresses of streams that are waited for are noted."""
    streams = load()._streams
    waited: list[int] = []
    synchronize = streams._Stream.synchronize

    def noted(stream: object) -> None:
        waited.append(stream.ptr)  # type: ignore[attr-defined]
        synchronize(stream)

    monkeypatch.setattr(streams._Stream, "synchronize", noted)
    given = batches(Loader(digits(), 64, workers=0), 0, device_backend())
    assert isinstance(given, Uploads)
    return given, waited


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "left alone"])
@pytest.mark.parametrize("count", [1, 2, None])
def test_all_copies_are_waited_for(monkeypatch: pytest.MonkeyPatch, count: int | None, closed: bool) -> None:
    """Also those of batches that were handed out and given back: the host may be steps ahead of the device."""
    given, waited = uploads(monkeypatch)
    for number, _ in enumerate(given, 1):
        if number == count:
            break
    number = given._stream.ptr  # type: ignore[attr-defined]
    waited.clear()
    if closed:
        given.close()
    else:
        del given
        gc.collect()
    assert number in waited
