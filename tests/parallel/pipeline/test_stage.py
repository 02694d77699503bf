"""What crosses from one stage of a pipeline to the next."""

import numpy as np

from nnmpi import Tensor
from nnmpi.nn.chain import unpack
from nnmpi.parallel.pipeline.boundary import BoundaryArrays, decode, encode, pack, signature_of
from tests.harness.refusals import usage_error


def test_pack_and_unpack_are_inverse():
    a, b, c = (Tensor(np.full(2, i)) for i in range(3))
    for x, single in ((a, True), ((a, b), False)):
        tensors, result = pack(x, {"later": c, "early": b}, 0)
        assert result is single
        again, saved = unpack(tensors, result, ["early", "later"])
        assert (again is a) if single else (again[0] is a and again[1] is b)
        assert saved == {"early": b, "later": c}


def test_what_is_no_tensor_cannot_cross():
    usage_error("stage 3 ends with a dict", pack, {"x": 1}, {}, 3)


def test_signatures_come_back_from_the_wire():
    values = BoundaryArrays(
        (np.ones((2, 0, 3), np.float32), np.ones((), np.int64)), (True, False), single=False
    )
    look = signature_of(values)
    key = ((4, 3), True)
    assert decode(encode(look, key), key) == look
    usage_error(
        r"of shape \(4, 3\) and \(5, 3\); give all of them the same part",
        lambda: decode(encode(look, key), ((5, 3), True)),
    )
    usage_error(
        "too many to announce",
        lambda: encode(signature_of(BoundaryArrays((np.ones(1),) * 2000, (True,) * 2000)), ()),
    )
