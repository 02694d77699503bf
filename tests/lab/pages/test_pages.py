"""Pages show what the package computes: driven by keys and sliders, on a phone's width and a
desk's, light and dark.
"""

import json
import re

import pytest

from nnmpi.comm.algorithms.registry import COLLECTIVES
from nnmpi.comm.collective import all_parts
from nnmpi.comm.duration import coefficients, price
from nnmpi.comm.machine import Machine
from nnmpi.lab.comm import main as comm
from nnmpi.lab.memory import main as memory
from nnmpi.lab.pages.page import make_page, write_page
from nnmpi.lab.render.collectives import animation
from nnmpi.lab.schedule import main as schedule
from nnmpi.memory.plan import LayerCost, parse_plan, price_plan
from tests.harness.refusals import usage_error
from tests.lab.pages.browser import look

# Chromium may be slow
pytestmark = [pytest.mark.host_only("pages are text"), pytest.mark.timeout(200)]


@pytest.mark.parametrize("one", COLLECTIVES.values(), ids=["-".join(key) for key in COLLECTIVES])
def test_a_film_ends_as_the_contract_says_when_its_price_is_over(one):
    """What is said of messages leads from the beginning to the end, and their clocks are those of
    `price`.
    """
    for size in (2, 3, 5, 8):
        result = animation(one, size)
        held = [row[:] for row in result["begins"]]
        for message in result["messages"]:
            for chunk, after in zip(message["chunks"], message["after"], strict=True):
                held[message["to"]][chunk] = after
        expected = [
            [one.contract.ends(rank, chunk, size) for chunk in range(one.contract.chunks(size))]
            for rank in range(size)
        ]
        for row, right in zip(held, expected, strict=True):
            assert all(
                parts is None or int(text, 16) == parts
                for text, parts in zip(row, right, strict=True)
            )
        latencies, buffers = max(message["clock"] for message in result["messages"])
        assert (latencies, buffers) == pytest.approx(coefficients(one, size)[:2])


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    """The page of a ring on 4 ranks."""
    file = tmp_path_factory.mktemp("pages") / "ring.html"
    assert comm(["render", "ring", "--ranks", "4", "--html", str(file)]).endswith(
        f"open {file} in a browser"
    )
    return file.read_text()


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    """The page of 1F1B with 3 stages and 4 microbatches."""
    file = tmp_path_factory.mktemp("pages") / "1f1b.html"
    schedule(["--pipeline", "1f1b", "--stages", "3", "--microbatches", "4", "--html", str(file)])
    return file.read_text()


@pytest.mark.parametrize("width, dark", [("desk", False), ("phone", True)])
def test_a_ring_is_stepped_through_with_keys(ring, tmp_path, width, dark):
    script = """
        const told = [texts(".figures")];
        press("Home");
        told.push(texts(".figures"), count("svg rect.part"));
        press("ArrowRight"); press("ArrowRight"); press("ArrowLeft"); press("ArrowRight");
        told.push(texts(".figures")[0], texts(".caption")[0]);
        press("End");
        told.push(texts(".figures"), count("svg rect.part"));
        return { told };
    """
    opened, before, parts, second, message, over, total_parts = look(
        ring, script, tmp_path, width, dark
    )["told"]
    ring_s, tree_s = (
        price(COLLECTIVES["all-reduce", name], 4, 2**20, Machine.uniform(1e-5, 8e-10))
        for name in ("ring", "tree")
    )
    assert opened[0].startswith("after 1 of 6 rounds")  # something has moved
    assert before[0].startswith("after 0 of 6 rounds, clock 0 s of ") and before[1].startswith(
        "after 0 of 4 rounds"
    )
    assert second.startswith("after 2 of 6 rounds") and second.endswith("8 messages")
    assert (
        message
        == "0 adds to 1: chunk 2; 1 adds to 2: chunk 3; 2 adds to 3: chunk 0; 3 adds to 0: chunk 1"
    )
    assert parts == 2 * 4 * 4 and total_parts == 2 * 4 * all_parts(4).bit_count() * 4
    for text, seconds in zip(over, (ring_s, tree_s), strict=True):
        shown = re.search(r"clock ([\d.]+) ms of ([\d.]+) ms", text)
        assert shown and shown[1] == shown[2] == f"{1e3 * seconds:.3g}"


@pytest.mark.parametrize(
    "network", [(), ("--network", "alpha_us=3,gbit=7"), ("--network", "alpha=0.002,beta=3e-9")]
)
def test_a_page_has_the_price_of_the_command_line(tmp_path, network):
    """Of an algorithm of one's own, too, whatever the sliders' steps are."""
    (tmp_path / "mine.py").write_text(
        "from nnmpi.comm.algorithms.ring import ring\ndef mine(rank, size): return ring(rank, size)"
    )
    local, file = f"{tmp_path}/mine.py:mine", tmp_path / "mine.html"
    comm(["render", local, "--ranks", "8", "--html", str(file), *network])
    text = look(file.read_text(), 'return { told: texts(".figures")[0] };', tmp_path)["told"]
    message = re.search(r": ([\d.]+) ms", comm(["simulate", local, "--ranks", "8", *network]))
    assert message and text.endswith(f" of {float(message[1]):.3g} ms, 8 messages")


def test_sliders_change_costs_and_crossings(ring, tmp_path):
    """More ranks, another algorithm, shorter buffers; what is not drawn is priced."""
    script = """
        const told = [texts(".crossings")[0]];
        take(1, "star"); move("ranks", 0); press("End");
        told.push(texts(".figures")[1]);
        move("ranks", document.querySelector('input[aria-label="ranks"]').max);
        told.push(texts(".caption")[0], texts("table tr").slice(1)[0]);
        move("buffer", 0);
        told.push(texts("table tr").slice(1)[0]);
        told.push(texts("text.axis"), document.querySelectorAll("path[stroke-dasharray]").length);
        return { told };
    """
    crossings, server, undrawn, long, tiny, axes, dashed = look(ring, script, tmp_path)["told"]
    assert axes == ["seconds of the collective, and where two cross", "bytes of a buffer"]
    assert dashed == len([1 for what, _ in COLLECTIVES if what == "all-reduce"]) - 1
    machine = Machine.uniform(1e-5, 8e-10)
    result = re.search(r"ring and tree cross at ([\d.]+) KiB", crossings)
    assert result
    around = [round(float(result[1]) * 1024 * part / 64) * 64 for part in (0.9, 1.1)]
    ring_s, tree_s = (
        [price(COLLECTIVES["all-reduce", name], 4, n, machine) for n in around]
        for name in ("ring", "tree")
    )
    assert ring_s[0] > tree_s[0] and ring_s[1] < tree_s[1]
    assert server.startswith("after 2 of 2 rounds")
    assert undrawn == (
        "126 messages one after another, 1.969 buffers' bytes; steps are drawn for up to 8 ranks"
    )
    assert long.startswith(("ring126", "h"))
    assert not tiny.startswith("ring")


EACH_WIDTH_AND_DARK = pytest.mark.parametrize("width, dark", [("desk", True), ("phone", False)])


@EACH_WIDTH_AND_DARK
def test_a_pipeline_is_stepped_through(pipeline, tmp_path, width, dark):
    script = """
        const told = [texts(".figures")[0], texts(".clock")[0]];
        const theme = () => document.documentElement.dataset.theme;
        const ask = (name) => dispatchEvent(new MessageEvent("message", { data: { theme: name } }));
        const own = theme();
        ask("light"); const light = theme(); ask("dark"); const dark = theme(); ask("");
        told.push([light, dark, theme() === own]);
        press("Home"); press("ArrowRight"); press("ArrowRight"); press("ArrowRight");
        told.push(texts(".clock")[0], texts("text.kept").slice(0, 3));
        take(0, "gpipe"); move("microbatches", 2);
        told.push(texts(".figures")[0], count(".wide rect[opacity]"), count(".wide text[style]"));
        return { told };
    """
    figures, over, themes, early, saved, gpipe, passes, numbers = look(
        pipeline, script, tmp_path, width, dark
    )["told"]
    assert passes == numbers > 0  # each pass has room for its number
    # of the page around it; with none of its own that of the system
    assert themes == ["light", "dark", True]
    assert figures == "18 ms, bubble 33.3 %, keeps at most 3 2 1 activations" and over.endswith(
        "ms"
    )
    assert (
        early.endswith("ms") and len(saved) == 3 and all(text.startswith("keeps") for text in saved)
    )
    assert gpipe == "30 ms, bubble 20.0 %, keeps at most 8 8 8 activations"


def test_a_page_begins_with_the_given_bytes_and_stages_of_a_rank_differ(tmp_path):
    """In the figures, and in colour."""
    file = tmp_path / "page.html"
    comm(["render", "ring", "--bytes", "64k", "--html", str(file)])
    found = look(file.read_text(), 'return { told: texts("output") };', tmp_path)
    assert found["told"][:2] == ["4", "64 KiB"]
    words = "--pipeline interleaved --stages 2 --microbatches 2 --html"
    schedule([*words.split(), str(file)])
    script = """
        const passes = [...document.querySelector(".wide svg").querySelectorAll("rect[opacity]")];
        return { told: [...new Set(passes.map((each) => each.getAttribute("fill")))].length };
    """
    assert look(file.read_text(), script, tmp_path)["told"] == 4


def test_a_plans_film_is_its_price():
    """Bytes and clock of each action; transfers go beside what is computed, one after another, and
    are waited for.
    """
    costs = [LayerCost("", 8, 8, 32, True, False, 1.0, 1.0, 2.0, True)] * 3
    price = price_plan(costs, parse_plan("K0 O0 K1 D1 A0 K2 D2 B2 I0 B1 B0"), 8.0)
    actions = price.rows
    assert (actions[-1][5], price.moved, price.recomputed) == (price.seconds, 32, 0)
    assert max(action[6] for action in actions) == price.peak and all(
        action[6] >= action[7] for action in actions
    )
    assert all(
        item[5] == other[3] <= other[4] <= other[5]
        for item, other in zip(actions, actions[1:], strict=False)
    )
    assert [action[8] for action in actions if action[8]] == [[1.0, 5.0], [8.0, 12.0]]
    assert {
        f"{action[0]}{action[1]}": action[4] - action[3]
        for action in actions
        if action[4] > action[3]
    } == {"A0": 3.0, "B0": 2.0}
    assert [action[2] for action in actions[:3]] == ["K  ", "O- ", "=K "]


@EACH_WIDTH_AND_DARK
def test_a_memory_plan_is_stepped_through(tmp_path, width, dark):
    file = tmp_path / "plan.html"
    printed = memory(f"plan --layers 6 --budget 50% --bandwidth 2MiB --html {file}".split())
    assert printed.endswith(f"open {file} in a browser")
    script = """
        const told = [texts(".figures")[0], count("rect.time"), count("path[data-name]")];
        press("Home"); press("ArrowRight"); press("ArrowRight");
        told.push(texts(".caption")[0]);
        take(0, "all kept"); press("End");
        told.push(texts(".figures")[0], texts(".caption")[0]);
        take(0, "recomputed"); move("budget", 0);
        told.push(texts(".figures")[0]);
        return { told };
    """
    first, boxes, lines, early, saved, end, least = look(
        file.read_text(), script, tmp_path, width, dark
    )["told"]
    this = re.search(
        r"this plan ([\d.]+ MiB) .*, ([\d.]+ s), .* recomputed: (\d+)\nmoved +([\d.]+ MiB)", printed
    )
    assert this and first.startswith(f"{this[2]}, at most {this[1]} of ")
    assert first.endswith(f"; {this[3]} layer recomputed, {this[4]} moved")
    assert boxes > 2 * 6 and lines == 3
    assert (
        early.startswith("action 2 of ")
        and "O0 (layer 0): its offloading begins; clock 1 s" in early
    )
    assert saved.startswith("18 s, at most 30 MiB of ") and saved.endswith("; 0 layers recomputed")
    assert end.startswith("action 17 of 17, B0")
    assert re.search(r"least +([\d.]+ MiB)", printed)[1] in least and not least.endswith(
        "; 0 layers recomputed"
    )


def test_a_page_is_one_file_and_names_cannot_break_it(tmp_path):
    name = "</script><script>alert(1)<!--<script> @STYLE@"
    page = make_page("collective", "a <b> & c @DATA@", {"name": name})
    assert "<h1>a &lt;b&gt; &amp; c @DATA@</h1>" in page and page.count("</script>") == 2
    data = page.split('id="data">')[1].split("</script>")[0]
    assert json.loads(data)["name"] == name and "<" not in data
    assert not re.search(
        r"""(src|href)=["']|https?://(?!www\.w3\.org/2000/svg)|@import|url\(""", page
    )
    usage_error(
        "cannot be written .*; give another file",
        lambda: write_page(tmp_path / "none" / "page.html", "collective", "t", {}),
    )
    usage_error(
        "--bandwidth is 0; give a whole number, 1 or more", memory, ["plan", "--bandwidth", "0"]
    )
    comm(["render", "ring", "--bytes", "0", "--html", str(tmp_path / "page.html")])
    usage_error(
        "a page draws 2 to 16 ranks, not 17",
        comm,
        ["render", "ring", "--ranks", "17", "--html", str(tmp_path / "page.html")],
    )
    usage_error(
        "up to 16 ranks and 32 microbatches, not 2 and 33",
        schedule,
        [
            "--pipeline",
            "1f1b",
            "--stages",
            "2",
            "--microbatches",
            "33",
            "--html",
            str(tmp_path / "p.html"),
        ],
    )
