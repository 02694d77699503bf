"""A recorded step as a program: what is noted, what spoils it, and where its memory lies."""

import operator
import pickle
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from nnmpi.backend.program.call import Call
from nnmpi.backend.program.plan import plan
from nnmpi.backend.program.record import RecordedArray, bare
from nnmpi.backend.program.replay import Arena, StepProgram
from nnmpi.backend.recording import Recorder, call, refuse
from nnmpi.base.errors import ShapeError
from tests.harness.refusals import refuses, usage_error


def natural(xp, x):
    y = x * x + 1
    y += x
    y[:, 0] = x[:, 1]
    y[1:] -= 2 * y[:-1]
    return y / np.linalg.norm(y, axis=1, keepdims=True)


def in_place(xp, x):
    y = xp.empty(x.shape, x.dtype)
    y[...] = x
    np.multiply(y, 3, y)  # `out` by position
    np.clip(y, -1, 1, y)
    y.clip(-0.5, 0.5, out=y)
    total = xp.zeros(x.shape[1:], x.dtype)
    for row in y:
        total += row
    np.add.at(y, [0, 0], total)
    return y


def makers(xp, x):
    y = np.full_like(x, 2) + np.ones_like(x) + np.zeros_like(x)
    y *= xp.full(x.shape, 0.5) + xp.ones(x.shape)
    y += xp.full(x.shape[1:], x[0])
    return xp.asarray(y).T + xp.ascontiguousarray(x.T)


def methods(xp, x):
    best, order = x.argmax(1), x.argsort(axis=1)
    picked = np.take_along_axis(x, order, 1) + x[np.arange(len(x)), best][:, None]
    z = picked.reshape(-1).copy().reshape(x.shape).astype(x.dtype) + x.mean(1, keepdims=True)
    z.sort(axis=0)
    z.fill(2)
    return z * x.sum() + x.T.dot(x).max() + x.std(0) + x.flatten().min()


def several(xp, x):
    whole, rest = np.divmod(x, 2)
    low, high = np.split(x, 2, axis=1)
    q, r = np.linalg.qr(x.T)
    rows, columns = np.broadcast_arrays(low, high)
    return whole * rest + (np.concatenate([rows, columns], 1) + np.fft.rfft(x).real.sum()) * r[0, 0]


def views(xp, x):
    flat = x.reshape(-1)
    windows = np.lib.stride_tricks.sliding_window_view(flat * 1, 3)
    parts = flat[::2], x.T[::-1], x[..., None], x.view(x.dtype), np.swapaxes(x, 0, 1)
    return windows.sum() + sum(part.reshape(-1)[0] * 2 for part in parts) + np.where(x > 0, x, 0)


def numbers(xp, x):
    """NumPy returns numbers, which `+=` does not change, and whose views are copies."""
    total, first = x.sum(), x[0, 0]
    before, again = total, first
    total += 1
    first *= x.dtype.type(2)
    part = first.reshape(1)
    part += 1
    cast = total.astype("float32")
    same = cast
    cast += 1
    first.fill(7)
    kind = isinstance(total, np.generic) + 2 * isinstance(total, np.ndarray)
    assert isinstance(total, float) == (x.dtype == "float64")
    return x * before + total + again * first + part + same + cast.real + total.T + kind


def effects(xp, x):
    """What is done beside the result, or in another way than by `out`."""
    y, rest = np.log(abs(x) + 3), np.empty_like(x)
    with np.errstate(all="ignore"):
        y[0, 0] = np.log(x[0, 0] * 0)
    np.nan_to_num(y, copy=False, neginf=5)
    whole, _ = np.divmod(x, 2, out=(None, rest))
    y += xp.full((3, 4), fill_value=(1.0, 2.0, 3.0, 4.0)) + xp.full(
        (4,), [x[0, 0], 1, 2, 3], "int8"
    )
    z = np.take(a=x, indices=[0, 1, 1, 0], axis=1) + np.argmax(a=x, axis=1)[:, None]
    z.setflags(write=False)
    half = (np.arctan(x) * 100).astype("float16") * 200
    ordered = np.piecewise(x, [x < 0], [lambda part: part * -2, lambda part: part + 1])
    part = (x * 1j).imag
    part += 1
    w = x + 1j
    w.imag += x
    return y + whole * rest + z + half.mean(0) + (half / 200).var(axis=0) + ordered + part + abs(w)


def powers(xp, x):
    """`**` is not `np.power` for some exponents, and for numbers."""
    y, total = abs(x) + 1, np.linspace(0.1, 3, 50, dtype=x.dtype) * x.max()
    half, number = y.astype("float16") ** 0.5, y.sum()
    roots = y * 1
    roots **= 0.5
    for item in total:
        number += abs(item) ** 2 + 1.5**item
    number /= number + 1
    roots **= number
    return roots + half + number**x + y**number + abs((x + 1j) ** 0.5) + (x > 1) ** 2 + 2**x


ALL = powers, natural, in_place, makers, methods, several, views, numbers, effects


def recorded(function, x):
    """Return a program of a function, its input and its result."""
    recorder = Recorder()
    with recorder.running():
        result = function(recorder.module(np), recorder.wrap(x))
    return recorder, bare(result)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("function", ALL)
def test_a_replay_computes_what_numpy_does(function, dtype):
    x = np.random.default_rng(0).normal(size=(3, 4)).astype(dtype)
    recorder, result = recorded(function, x)
    np.testing.assert_array_equal(result, function(np, x))
    assert recorder.spoiled == ""
    program = StepProgram(recorder, Arena())
    for factor in (-1.5, 4.0, 0.25):
        x *= factor
        program.replay()
        np.testing.assert_array_equal(result, function(np, x))
    assert len(str(program).splitlines()) == len(recorder.calls) + 1


def reshaped_in_place(x):
    y = x * 2
    y.shape = 4, 3
    y.flat = y[0]
    return y


def in_a_thread(x):
    y = np.empty_like(x)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(operator.setitem, y, slice(None), x).result()
    return y


def fails(x):
    try:
        return x @ x
    except ValueError:
        return x * 2


@pytest.mark.parametrize(
    "read, words",
    [
        (lambda x: x.max() > 0 and x, "reads a value .bool"),
        (lambda x: float(x[0, 0]), "float"),
        (lambda x: int(x[0, 0]), "int"),
        (lambda x: [1, 2, 3, 4][np.argmax(x[0])], "index"),
        (lambda x: 1.0 in x, "contains"),
        (lambda x: x * float(f"{x[0, 0]:.1f}"), "reads a value .format"),
        (lambda x: x * float(str(x.max())), "reads a value .str"),
        (lambda x: x[0, 0].item(), "item returns float"),
        (lambda x: x.tolist(), "tolist returns list"),
        (lambda x: x.tobytes(), "tobytes returns bytes"),
        (np.asarray, "np.asarray, reads an array"),
        (np.array, "np.asarray, reads an array"),
        (np.ascontiguousarray, "np.asarray, reads an array"),
        (lambda x: operator.setitem(np.zeros(x.shape), slice(None), x), "reads an array"),
        (lambda x: operator.setitem(np.zeros(x.shape), 0, x.sum()), "reads an array"),
        (lambda x: np.full(x.shape, x[0, 0]), "reads an array"),
        (lambda x: np.random.default_rng(0).normal(x), "reads an array"),
        (lambda x: np.array_equal(x, x), "array_equal returns bool"),
        (lambda x: x.flat[3], "x.flat is read"),
        (lambda x: x[x > 0], "the shape of x.mask. depends"),
        (np.nonzero, "the shape of np.nonzero's result"),
        (lambda x: x.nonzero(), "the shape of x.nonzero's result"),
        (lambda x: np.where(x > 0), "the shape of np.where's result"),
        (np.unique, "the shape of np.unique's result"),
        (lambda x: np.multiply(x, 2)[np.argmax(x[:, 0])], "of which part of an array"),
        (lambda x: np.split(x, np.argmax(x, 0)[:1])[0], "of which part of an array"),
        (lambda x: np.delete(x, x[:, 0] > 0, 0), "the shape of np.delete's result"),
        (lambda x: x.repeat(np.argmax(x, 1), 0), "the shape of x.repeat's result"),
        (lambda x: np.real_if_close(x + 0j), "the shape of np.real_if_close's result"),
        (lambda x: x.astype(object), "Python objects"),
        (lambda x: {x[0, 0]: 1}[x[0, 0]], "reads a value .hash"),
        (lambda x: round(x[0, 0], 1), "reads a value .round"),
        (lambda x: pickle.loads(pickle.dumps(x)), "reads a value .reduce_ex"),
        (lambda x: x[0, 0].is_integer(), "x.is_integer is read"),
        (lambda x: np.concatenate(deque([x, x])), "reads an array"),
        (lambda x: np.putmask(y := x.astype("int32"), x > 0, x[0, 0]) or y, "casts a number"),
        (lambda x: np.errstate(over="raise")(np.exp)(x), "waits for errors of floating point"),
        (reshaped_in_place, "x.shape is assigned"),
        (in_a_thread, "another thread computes"),
        (fails, "matmul raised ValueError"),
    ],
)
def test_what_a_replay_would_freeze_is_noted(read, words):
    x, other = (np.arange(-5.0, 7).reshape(3, 4) for _ in range(2))
    recorder = Recorder()
    with recorder.running():
        got = read(recorder.wrap(x))
    assert recorder.spoiled
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(recorder.spoiled)
    np.testing.assert_equal(bare(got), read(other))  # the step itself is right


def test_shapes_and_constants_spoil_nothing():
    recorder, _ = recorded(
        lambda xp, x: (
            x * np.arange(x.shape[1]) + np.ndim(x) + x.ndim + len(x) + np.result_type(x).itemsize,
            isinstance(x, np.ndarray) and x.flags.c_contiguous and x.strides,
            repr(x),
            np.may_share_memory(x, x[0]),
        ),
        np.ones((2, 3)),
    )
    assert recorder.spoiled == ""


def test_outside_of_a_recording_the_array_is_an_array():
    x = RecordedArray(np.arange(4.0))
    assert type(x + 1) is np.ndarray
    assert np.asarray(x).tolist() == [0, 1, 2, 3]
    assert float(x[3]) == 3
    assert x.__array_namespace__() is np


def test_shapes_that_change_in_a_replay_are_refused():
    counts = [2, 3]
    recorder, _ = recorded(
        lambda xp, x: recorder_of().whole(lambda item: item[: counts.pop(0)] * 1, (bare(x),)),
        np.ones(4),
    )
    refuses(
        ShapeError,
        "gave .3,. in place of the .2,. that was recorded",
        lambda: StepProgram(recorder, Arena()).replay(),
    )


def recorder_of():
    from nnmpi.backend.recording import active

    return active()


def test_what_is_performed_is_noted_as_a_whole():
    seen, recorder = [], Recorder()

    def work(x):
        call(seen.append, (x,))
        refuse("nothing is recorded in here, so this")
        return len(seen)

    with recorder.running():
        assert call(work, (5,)) == 1
        usage_error("reading values", refuse, "reading values")
    assert len(recorder.calls) == 1
    StepProgram(recorder, Arena()).replay()
    assert seen == [5, 5]
    assert call(work, (6,)) == 3
    assert len(recorder.calls) == 1


def test_inputs_come_anew():
    source, recorder = [np.arange(300.0)], Recorder()
    with recorder.running():
        got = call(lambda: source[0], when="before")
        result = bare(recorder.wrap(got) * 2)
    source[0] = np.ones(300)
    StepProgram(recorder, Arena()).replay()
    np.testing.assert_array_equal(result, np.full(300, 2.0))


def test_lists_of_calls_that_keep_them_stay_the_same_objects():
    recorder, items, table = Recorder(), [np.ones(3)], {}
    with recorder.running():
        call(lambda given, kept: kept.update(n=given), (items, table))
    table.clear()
    StepProgram(recorder, Arena()).replay()
    assert table["n"] is items


def lives(calls):
    """Return for each buffer in a plan its first and last call, by hand, and its bytes."""
    found = {}
    for i, item in enumerate(calls):
        for ref in item.refs():
            begin, end = found.get(ref.allocation, (i, i))
            last = i if item.writes is not None else ref.allocation.freed
            found[ref.allocation] = begin, max(end, i, last)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_results_that_live_at_one_time_do_not_share_memory(seed):
    draw, recorder = np.random.default_rng(seed), Recorder()
    with recorder.running():
        live = [recorder.module(np).ones(100)]
        for _ in range(60):
            x = live[draw.integers(len(live))]
            live.append(np.concatenate([x, x[: draw.integers(1, 300)]]) * 2.0)
            if draw.random() < 0.2:
                call(abs, (x,))
            if draw.random() < 0.8:
                del live[draw.integers(len(live))]
        live.clear()
        del x
    places, size = plan(recorder.calls)
    spans = lives(recorder.calls)
    assert places.keys() == spans.keys()
    assert size == max(places[b] + -(-b.size // 64) * 64 for b in places)
    least = max(
        sum(b.size for b, (begin, end) in spans.items() if begin <= i <= end)
        for i in range(len(recorder.calls))
    )
    assert least <= size <= 2 * least
    for a, (a_begin, a_end) in spans.items():
        for b, (b_begin, b_end) in spans.items():
            if a is not b and a_begin <= b_end and b_begin <= a_end:
                assert places[a] + a.size <= places[b] or places[b] + b.size <= places[a]


def test_memory_is_used_again():
    """A chain of results needs two places, not one for each; the last one is held outside."""

    def chain(xp, x):
        for _ in range(10):
            x = xp.add(x, 1)
        return x

    x = np.arange(1000.0)
    recorder, y = recorded(chain, x)
    program = StepProgram(recorder, Arena())
    assert program.size_bytes == 2 * 8000
    x *= 2
    y[...] = 0
    program.replay()
    np.testing.assert_array_equal(y, x + 10)


@pytest.mark.parametrize("writes", [None, ()])
def test_what_a_call_may_keep_lives_as_long_as_it_did(writes):
    """A send has its array until the wait; a kernel only while it computes."""
    recorder, kept = Recorder(), []
    with recorder.running():
        x = recorder.wrap(np.ones(1000))
        y = x + 1
        call(lambda array: kept.append(array), (y,), writes)
        z = (x + 2) * 3
        call(kept.clear, (), writes)
        del y, z
    (first, last) = lives(recorder.calls)[next(iter(recorder.calls[0].refs())).allocation]
    assert (first, last) == (0, 5 if writes is None else 1)


def test_what_somebody_holds_has_memory_of_its_own():
    recorder, (held,) = recorded(lambda xp, x: ([x * 2],)[0], np.ones(500))
    places, size = plan(recorder.calls)
    assert (places, size) == ({}, 0)
    program = StepProgram(recorder, Arena())
    held[...] = 0
    program.replay()
    assert held.tolist() == [2.0] * 500


def test_what_is_freed_while_a_program_is_made_keeps_its_memory(monkeypatch):
    """As by another thread, or by Python's search for cycles."""
    recorder, (held,) = recorded(lambda xp, x: ([x * 2],)[0], np.ones(500))
    with monkeypatch.context() as patch:

        def plan_and_free(calls):
            nonlocal held
            result, held = plan(calls), None
            return result

        patch.setattr("nnmpi.backend.program.replay.plan", plan_and_free)
        program = StepProgram(recorder, Arena())
    program.replay()


def test_programs_share_a_block_that_grows():
    arena, programs = Arena(), []
    for count in (1000, 3000, 2000):
        x = np.arange(float(count))
        recorder, y = recorded(lambda xp, x: (x + 1) * 2 + 1, x)
        programs.append((StepProgram(recorder, arena), x, y))
    for program, x, y in 2 * programs:
        y[...] = 0
        program.replay()
        np.testing.assert_array_equal(y, (x + 1) * 2 + 1)
    assert arena.size_bytes == 2 * 24000  # of the largest; each program is bound to it anew


def test_a_program_reads_like_its_source():
    recorder, _ = recorded(lambda xp, x: np.maximum(x * 2, 0).sum(axis=0), np.ones((2, 3)))
    assert str(StepProgram(recorder, Arena())).splitlines() == [
        "    0  multiply(array[2 3], 2, out=%0[2 3])",
        "    1  maximum(%0[2 3], 0, out=%1[2 3])",
        "    2  ndarray.sum(%1[2 3], axis=0, out=%2[3])",
        "3 calls, 128 bytes for results",
    ]
    assert str(Call(print, (1, "x"))) == "print(1, x)"


def test_a_program_is_drawn(tmp_path):
    """Its results by their places, each from its first call to its last; none if none has one."""
    recorder, y = recorded(lambda xp, x: (x + 1) * (x * 2) - 3, np.ones(8))
    picture = StepProgram(recorder, Arena()).picture()
    spans = [(bar.row, bar.begin, bar.end, bar.text) for bar in picture.bars]
    assert spans == [("  0", 0, 3, "%0"), (" 64", 1, 3, "%1"), ("128", 2, 4, "%2")]
    assert picture.title.startswith("192 bytes") and y.tolist() == [1] * 8
    picture.save(tmp_path / "step.svg")
    usage_error("no results of their own", lambda: StepProgram(Recorder(), Arena()).picture())


def test_a_callback_is_called_in_each_replay():
    """It may read and write arrays of the operation."""

    def running(xp, x):
        total, scale = xp.zeros(x.shape[1:]), x.max()

        def add(row):
            total[...] += row * float(scale)
            return row

        np.apply_along_axis(add, 1, x)
        return total * 1

    x = np.arange(12.0).reshape(3, 4)
    recorder, y = recorded(running, x)
    program = StepProgram(recorder, Arena())
    for _ in range(2):
        x += 1
        program.replay()
        np.testing.assert_array_equal(y, running(np, x))
    assert recorder.spoiled == ""


def test_a_reduction_of_a_number_has_an_axis():
    x = np.arange(4.0)
    recorder, y = recorded(lambda xp, x: np.sum(x.sum(), axis=0) * 2, x)
    x += 1
    StepProgram(recorder, Arena()).replay()
    assert y == 20


def test_results_that_are_read_only_are_written_by_replays():
    def fixed(xp, x):
        y = x * 2
        y.flags.writeable = False
        return y

    x = np.ones(4)
    recorder, y = recorded(fixed, x)
    x += 1
    StepProgram(recorder, Arena()).replay()
    assert y.tolist() == [4] * 4
    assert not y.flags.writeable
