"""The page on which a reader writes Python: its programs are proved, priced and drawn, by the
package itself and in Chromium, from a disk and without a network.
"""

import html
import json
import queue
import runpy
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.lab.pages.browser import CHROMIUM

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "docs" / "browser"
KINDS = ("all_reduce", "schedule")
PROGRAMS = {kind: (FOLDER / f"{kind}.py").read_text() for kind in KINDS}
SETTINGS = {"ranks": "4", "microbatches": "8", "network": "alpha_us=10,gbit=10"}

pytestmark = [pytest.mark.host_only("pages are text"), pytest.mark.timeout(300)]


def show(tmp_path, kind, program, **settings):
    """Return what the page shows of a program, by a Python that has nothing but itself."""
    code = (
        "import sys\n"
        "for name in ('numpy', 'mpi4py', 'safetensors', 'threadpoolctl', 'filelock', 'resource'):\n"
        "    sys.modules[name] = None\n"
        "import runpy\n"
        f"show = runpy.run_path({str(FOLDER / 'run.py')!r})['show']\n"
        "print(show(*sys.argv[1:]))\n"
    )
    words = [kind, program, json.dumps(SETTINGS | settings)]
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    ran = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(ran.stdout)


def test_a_right_all_reduce_is_proved_priced_and_drawn(tmp_path):
    result = show(tmp_path, "all_reduce", PROGRAMS["all_reduce"])
    assert result["text"].startswith("proved on 4 ranks: 6 rounds, 6 messages, 24 chunks sent")
    # 6 x (10 us + 1 MiB x 0.8 ns)
    assert "  yours             5.093 ms" in result["text"] and not result["failed"]
    assert "your all-reduce beside others" in result["page"]
    assert '"first":"yours"' in result["page"]


def test_a_right_schedule_is_checked_and_drawn(tmp_path):
    result = show(tmp_path, "schedule", PROGRAMS["schedule"], network="")
    assert "bubble            60.0 %" in result["text"] and "rank 3  .  .  .  F0" in result["text"]
    assert "your schedule beside others" in result["page"]
    slower = show(tmp_path, "schedule", PROGRAMS["schedule"], network="alpha_us=1000,gbit=1")
    assert "message 9.389 ms" in slower["text"]
    assert slower["page"] != result["page"]


@pytest.mark.parametrize(
    "kind, program, settings, sentence",
    [
        (
            "all_reduce",
            PROGRAMS["all_reduce"].replace(", reduce=True", ""),
            {},
            "nnmpi: rank 0 ends without the part of ranks 1-3 in chunk 0 (last written in step 1)",
        ),
        (
            "schedule",
            PROGRAMS["schedule"].replace("tuple(program)", "tuple(reversed(program))"),
            {},
            "comes before 0F",
        ),
        ("all_reduce", "def all_reduce(rank, size): return 1 / 0", {}, "in line 1 of mine.py"),
        ("all_reduce", "x = 1", {}, "define all_reduce(rank, size)"),
        ("all_reduce", "x = (", {}, "'(' was never closed"),
        ("schedule", "import no_such_package", {}, "No module named 'no_such_package'"),
        ("all_reduce", PROGRAMS["all_reduce"], {"ranks": "99"}, "give a whole number, 2 to 8"),
        ("schedule", PROGRAMS["schedule"], {"microbatches": "x"}, "give a whole number, 1 to 16"),
        ("all_reduce", PROGRAMS["all_reduce"], {"network": "fast"}, "is not understood"),
    ],
)
def test_mistakes_are_named(kind, program, settings, sentence, tmp_path):
    result = show(tmp_path, kind, program, **settings)
    assert sentence in result["text"] and result["failed"] and not result["page"]
    assert "run.py" not in result["text"]


SCRIPT = """
    const forms = [...document.querySelectorAll("form")], told = [];
    const press = (form) => {
      const over = new Promise((done) => new MutationObserver((_, watch) => {
        if (form.dataset.state === "runs") return;
        watch.disconnect();
        done();
      }).observe(form, { attributeFilter: ["data-state"] }));
      form.requestSubmit();
      return over;
    };
    const tell = (form) => told.push([form.dataset.state, form.querySelector(".told").textContent]);
    const [area] = forms[0].querySelectorAll("textarea"), right = area.value;
    await press(forms[0]);
    tell(forms[0]);
    const page = forms[0].querySelector("iframe");
    await new Promise((done) => page.addEventListener("load", done));
    const figures = page.contentDocument.querySelector(".figures").textContent;
    area.value = right.replace(", reduce=True", "");
    await press(forms[0]);
    tell(forms[0]);
    area.value = right.replace("    steps = []", "    while True: pass");
    const endless = press(forms[0]);
    await new Promise((done) => setTimeout(done, 500));
    forms[0].requestSubmit();
    await endless;
    tell(forms[0]);
    await press(forms[1]);
    tell(forms[1]);
    return { told, figures };
"""


def test_a_reader_runs_programs_in_chromium(tmp_path):
    """From a disk, where nothing else can be reached: right and wrong, ended while it runs, and
    after that.
    """
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here")
    for name in ("docs", "pages", "_static"):
        (tmp_path / name).mkdir()
    build = runpy.run_path(str(ROOT / "docs" / "conf.py"))
    if not build["write_python"](tmp_path / "pages" / "python.js"):
        pytest.skip("npm has no Python for browsers here")
    (tmp_path / "_static" / "browser.js").write_text(
        (ROOT / "docs" / "_static" / "browser.js").read_text()
    )
    found = answered(tmp_path / "docs" / "browser.html", tmp_path / "user")
    (shown, right), wrong, stopped, (drawn, grid) = found["told"]
    assert shown == drawn == "shown" and right.startswith("proved on 4 ranks: 6 rounds")
    assert found["figures"].startswith("after 1 of 6 rounds")
    assert wrong[0] == "failed" and "rank 0 ends without the part of ranks 1-3" in wrong[1]
    assert stopped == ["failed", "stopped"]
    assert "bubble            60.0 %" in grid


def answered(file, user):
    """Return what `SCRIPT` returns on the page, which is written to `file`; it tells a server."""
    answers = queue.Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            answers.put(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *args):
            """Say nothing."""

    blocks = "".join(
        f'<div class="try-{kind.replace("_", "-")}"><pre>{html.escape(text)}</pre></div>'
        for kind, text in PROGRAMS.items()
    )
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        file.write_text(
            f'<!doctype html><meta charset="utf-8"><body>{blocks}'
            '<script src="../_static/browser.js"></script><script>'
            f"(async () => {{ {SCRIPT} }})().catch(String).then((found) =>"
            f' fetch("http://127.0.0.1:{server.server_port}/",'
            ' {method: "POST", mode: "no-cors", body: JSON.stringify(found)}));</script>'
        )
        words = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            f"--user-data-dir={user}",
        ]
        browser = subprocess.Popen(
            [str(CHROMIUM), *words, file.as_uri()], stderr=subprocess.DEVNULL
        )
        try:
            return json.loads(answers.get(timeout=200))
        finally:
            browser.kill()
            browser.wait()
            server.shutdown()
