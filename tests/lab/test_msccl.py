"""Programs of MSCCL: proved, run and written; a wrong one is named by rank, thread block, step."""

import re

import numpy as np
import pytest

from nnmpi import simulate
from nnmpi.base.custom import load_custom
from nnmpi.base.errors import NnmpiError, ScheduleError
from nnmpi.comm.algorithms.registry import ALGORITHMS, COLLECTIVES
from nnmpi.comm.collective import Collective
from nnmpi.comm.duration import coefficients
from nnmpi.comm.prove import prove
from nnmpi.lab import msccl
from nnmpi.lab.comm import main
from nnmpi.lab.msccl import read_program, write_program
from nnmpi.train.cli import main as train
from tests.harness.refusals import refuses, usage_error


def program(coll, parts, in_place, scratch, blocks, ranks=2):
    """Return a program's text.

    Args:
        blocks: of a rank, as (send, recv, operations); an operation is "kind source target count"
            and maybe "after.block.step".
    """
    lines = []
    for rank in range(ranks):
        sizes = f'i_chunks="{parts}" o_chunks="{0 if in_place else parts}" s_chunks="{scratch}"'
        lines.append(f'<gpu id="{rank}" {sizes}>')
        for number, (send, recv, text) in enumerate(blocks(rank)):
            lines.append(f'<tb id="{number}" send="{send}" recv="{recv}" chan="0">')
            for at, line in enumerate(filter(None, text.split(";"))):
                kind, source, target, count, *after = line.split()
                block, step = after[0].split(".") if after else ("-1", "-1")
                lines.append(
                    f'<step s="{at}" type="{kind}" srcbuf="{source[0]}" srcoff="{source[1:]}"'
                    f' dstbuf="{target[0]}" dstoff="{target[1:]}" cnt="{count}" depid="{block}"'
                    f' deps="{step}" hasdep="0"/>'
                )
            lines.append("</tb>")
        lines.append("</gpu>")
    head = f'nchunksperloop="{parts}" ngpus="{ranks}" coll="{coll}" inplace="{in_place:d}"'
    return "\n".join([f'<algo name="own" proto="Simple" nchannels="1" {head}>', *lines, "</algo>"])


def ring(a):
    """Sums go around without being kept, then results."""
    b, c = (a - 1) % 3, (a - 2) % 3
    text = f"s i{a} i{a} 1; rrs i{b} i{b} 1; rrcs i{c} i{c} 1; rcs i{a} i{a} 1; r i{b} i{b} 1"
    return [(c, b, text)]


def pair(rank):
    """Each sends its input into the other's scratch; another block adds it, and a third copies."""
    return [
        (1 - rank, 1 - rank, "s i0 s0 2; r i0 s0 2"),
        (-1, -1, "nop i-1 o-1 0 0.0; re s0 i0 2 0.1"),
        (-1, -1, "cpy i0 o0 2 1.1"),
    ]


def transpose(rank):
    a, b = 2 * rank, 2 - 2 * rank
    other = 1 - rank
    return [(other, other, f"s i{b} o{a} 2; r i{a} o{b} 2"), (-1, -1, f"cpy i{a} o{a} 2")]


PAIR = program("allreduce", 2, False, 2, pair)
PROGRAMS = {
    "ring": program("allreduce", 3, True, 0, ring, 3),
    "pair": PAIR,
    "transpose": program("alltoall", 4, False, 0, transpose),
    "scatter": program(
        "reduce_scatter", 2, False, 0,
        lambda r: [(1 - r, 1 - r, f"s i{1 - r} o0 1; cpy i{r} o0 1; rrc o0 o0 1")],
    ),
    "gather": program(
        "allgather", 2, False, 0,
        lambda r: [(1 - r, 1 - r, f"s i0 o{r} 1; r i0 o{1 - r} 1"), (-1, -1, f"cpy i0 o{r} 1")],
    ),
    # the second rank has more of a buffer in front of scratch
    "larger": PAIR[:500] + PAIR[500:].replace('o_chunks="2"', 'o_chunks="4"'),
    "root": program(
        "broadcast", 2, True, 0,
        lambda r: [(-1, 0, "r i0 i0 1; r i1 i1 1") if r else (1, -1, "s i0 i0 1; s i1 i1 1")],
    ),
}  # fmt: skip


def read(text, folder):
    file = folder / "own.xml"
    file.write_text(text)
    result = load_custom(str(file), "--allreduce", "")
    assert isinstance(result, Collective)
    return result


def check_sums(collective):
    """Run it on every length, twice."""

    def sums(group):
        n = group.size
        for length in (0, 1, 7, 24):
            x = np.arange(length, dtype="f4")
            array = x * (group.rank + 1)
            pending = group.bind(array, collective)
            pending.run()
            assert (array == x * n * (n + 1) / 2).all()
            pending.start()
            pending.wait()
            assert (array == x * n * n * (n + 1) / 2).all()

    simulate(sums, collective.ranks or 0)


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_are_proved_and_run(name, tmp_path):
    """Of every operation and collective, in place or not, with messages whose chunk is reused."""
    collective = read(PROGRAMS[name], tmp_path)
    operation = collective.contract.name
    said = main(["prove", str(tmp_path / "own.xml")])
    assert said.startswith(f"{operation} by {tmp_path}/own.xml is right on {collective.ranks} rank")
    assert main(["render", str(tmp_path / "own.xml")]).startswith(f"{operation} by own")
    assert "finish" in main(["simulate", str(tmp_path / "own.xml"), "--bytes", "64k"])
    if operation == "all-reduce":
        check_sums(collective)


def test_a_program_costs_what_its_messages_cost(tmp_path):
    """A ring of sums that are not kept is as fast as ours."""
    assert coefficients(read(PROGRAMS["ring"], tmp_path), 3) == pytest.approx(
        coefficients(ALGORITHMS["ring"], 3)
    )


WRITTEN = [key for key in COLLECTIVES if key[0] not in ("all-to-all", "neighbour-average")]


@pytest.mark.parametrize("key", WRITTEN)
@pytest.mark.parametrize("size", [2, 3, 4, 6, 8])
def test_ours_are_written_and_read(key, size, tmp_path):
    file = tmp_path / "own.xml"
    words = ["export", key[1], "--operation", key[0], "--ranks", str(size), "--format", "msccl"]
    assert main([*words, "--out", str(file)]) == f"{key[1]} for {size} ranks is in {file}"
    assert main(words) + "\n" == file.read_text()
    collective = read_program(file)
    assert collective.contract.name == key[0]
    sent = prove(COLLECTIVES[key], size).chunk_transfers
    assert prove(collective, size).chunk_transfers == sent
    # a rank's messages leave in their order; others send chunks apart, which are several here
    if key[0] == "all-reduce":
        cost = coefficients(collective, size)
        assert cost == pytest.approx(coefficients(COLLECTIVES[key], size))
    if key[0] == "all-reduce" and size in (3, 4):
        check_sums(collective)


PLACE = r"rank \d, thread block \d, step \d"
# a program, what is changed, into what, which of its places (of several), and what is said
WRONG = [
    ("ring", "rrs", "rcs", 0, rf"{PLACE}.* ends without the part of rank|ends without the part"),
    ("ring", "rrcs", "rcs", 0, r"ends without the part of rank"),
    ("ring", 'type="rcs"', 'type="rrcs"', 0, rf"{PLACE}.* counts ranks? .* twice"),
    ("ring", 'type="r"', 'type="rrc"', 1, rf"{PLACE}.* counts ranks? .* twice"),
    ("ring", 'send="1"', 'send="2"', 0, r"rank \d, thread block 0, step \d (waits|sends)"),
    ("ring", 'chan="0"', 'chan="1"', 0, "rank 1, thread block 0, step 1 waits for a message"),
    ("ring", 'type="s"', 'type="nop"', 0, "rank 1, thread block 0, step 4 waits for a message"),
    ("ring", 'srcoff="1"', 'srcoff="2"', 0, "rank . ends|counts"),
    ("pair", 'depid="0" deps="1"', 'depid="-1" deps="-1"', 0, rf"race: {PLACE} and thread block"),
    ("pair", 'depid="1" deps="1"', 'depid="-1" deps="-1"', 0, rf"race: {PLACE} and thread block"),
    ("pair", 'depid="1" deps="1"', 'depid="1" deps="0"', 1, "race: rank 1, thread block 1, step 1"),
    ("pair", 'depid="0" deps="0"', 'depid="1" deps="1"', 0, "deadlock: rank 0, thread block 1"),
    ("pair", 'depid="0" deps="1"', 'depid="7" deps="1"', 0, "thread block 7, step 1, which is not"),
    ("pair", 'type="re"', 'type="cpy"', 0, "rank 0 ends without the part of rank 0 in chunk"),
    ("pair", 'dstoff="0" cnt="2"', 'dstoff="1" cnt="1"', 1, rf"{PLACE} sends 2 chunks to {PLACE}"),
    ("pair", 'type="cpy"', 'type="nop"', 1, "rank 1 ends without the part of"),
    ("transpose", 'dstoff="2"', 'dstoff="0"', 0, "race|ends|expects chunks"),
    ("transpose", 'recv="1"', 'recv="-1"', 0, "rank 0, thread block 0, step 1 waits for a mess"),
    ("scatter", 'type="rrc"', 'type="r"', 1, r"rank 1 ends without the part of rank 1 in chunk"),
    ("scatter", 'type="cpy"', 'type="nop"', 0, "rank 0, thread block 0, step 2 .*adds chunk 2"),
    ("gather", 'srcoff="0"', 'srcoff="1"', 2, "rank 0, thread block 1, step 0 reads chunk 1"),
    ("root", 'type="r"', 'type="nop"', 1, "step 1 sends a message that rank 1 never receives"),
]  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_single_change_is_refuted(case, tmp_path):
    name, old, new, which, sentence = case
    *before, after = PROGRAMS[name].split(old, which + 1)
    text = old.join(before) + new + after
    refuses(
        ScheduleError,
        sentence,
        lambda: prove(collective := read(text, tmp_path), collective.ranks or 0),
    )


def changed(old, new):
    return PAIR.replace(old, new, 1)


def empty(rank):
    return []


ENTITIES = '<!DOCTYPE a [<!ENTITY b "c"><!ENTITY d "&b;&b;">]>'
BAD = {
    "empty": ("", "no element found"),
    "text": ("ring", "syntax error"),
    "cut": (PAIR[:900], "no element found|unclosed"),
    "entities": (ENTITIES + PAIR, "declares a document type"),
    "no block": (program("allreduce", 2, True, 0, empty, 0), "ngpus='0' is no whole number of 1"),
    "no ranks": (program("allreduce", 2, True, 0, empty), "has no thread block"),
    "misplaced": ("<step/>", "cnt='' is no whole number"),
    "no head": ('<gpu id="0" i_chunks="1" o_chunks="1" s_chunks="0"/>', "are misplaced"),
    "a collective": (changed("allreduce", "custom"), "its collective is 'custom'; it can be"),
    "an operation": (changed('type="re"', 'type="rx"'), "its operation 'rx' is none of"),
    "a rank": (changed('gpu id="1"', 'gpu id="2"'), "rank 2 or one that it names is none"),
    "a partner": (changed('send="1"', 'send="5"'), "rank 0 or one that it names is none"),
    "a chunk": (changed('srcoff="0"', 'srcoff="9"'), r"rank 0 has no chunks 9\+2 of that buffer"),
    "a buffer": (changed('srcbuf="s"', 'srcbuf="t"'), "of that buffer"),
    "a word": (changed('cnt="2"', 'cnt="two"'), "cnt='two' is no whole number of 0 or more"),
    "a large number": (changed('cnt="2"', f'cnt="{"9" * 5000}"'), "is no whole number of 0"),
    "no target": (
        program("allreduce", 2, True, 0, lambda r: [(1 - r, 1 - r, "s i0 i0 1; rrc i0 i-1 1")]),
        "dstoff='-1' is no whole number of 0 or more",
    ),
    "no source": (
        program("allreduce", 2, True, 0, lambda r: [(1 - r, 1 - r, "s i-1 i0 1; r i0 i0 1")]),
        "srcoff='-1' is no whole number of 0 or more",
    ),
    "many chunks": (changed('s_chunks="2"', 's_chunks="99999999"'), "more than 65536 chunks"),
    "many ranks": (changed('ngpus="2"', 'ngpus="99999999"'), "more than 8192 chunks of input"),
    "uneven": (PROGRAMS["transpose"].replace('perloop="4"', 'perloop="3"'), "3 chunks are"),
    "many steps": (
        program("allreduce", 2, True, 0, lambda rank: [(-1, -1, "nop i-1 o-1 0;" * 2001)]),
        "more than 2000 chunks in its steps",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_one_sentence(name, tmp_path, monkeypatch):
    monkeypatch.setattr(msccl, "MOST", 2000)
    text, sentence = BAD[name]
    usage_error(rf"own\.xml: no program of MSCCL \(.*({sentence})", read, text, tmp_path)


def test_other_files_ranks_and_operations(tmp_path, monkeypatch):
    for name in ("pair", "gather"):
        (tmp_path / f"{name}.xml").write_text(PROGRAMS[name])
    for words, sentence in (
        (["prove", f"{tmp_path}/gone.xml"], "No such file"),
        (["prove", f"{tmp_path}/pair.xml", "--ranks", "3"], "is for 2 ranks, not for 3"),
        (
            ["prove", f"{tmp_path}/gather.xml", "--operation", "broadcast"],
            "for all-gather, not for",
        ),
        (["export", "pairwise", "--ranks", "4"], "all-to-all by pairwise is not written"),
        (["export", "ring", "--out", f"{tmp_path}/none/x"], "cannot be written"),
        (["export", "ring", "--ranks", "1"], "one rank sends nothing, so there is no program"),
    ):
        refuses(NnmpiError, sentence, main, words)
    monkeypatch.setattr(msccl, "MOST_BYTES", 10)
    usage_error("longer than", main, ["prove", f"{tmp_path}/pair.xml"])


def test_a_training_sums_by_a_program(tmp_path, capfd):
    """Its losses are those of our ring, to rounding."""
    losses = []
    for name, text in (("ring", ""), (f"{tmp_path}/own.xml", write_program(ALGORITHMS["ring"], 3))):
        (tmp_path / "own.xml").write_text(text)
        words = f"--dataset iris --model mlp --hidden 5 --epochs 2 --allreduce {name}"
        simulate(
            lambda group, w=words: train(f"{w} --out {tmp_path}/{len(losses)}".split(), group), 3
        )
        losses.append(re.findall(r"test loss ([\d.]+)", capfd.readouterr().out))
    assert losses[0] == losses[1] and losses[0]
