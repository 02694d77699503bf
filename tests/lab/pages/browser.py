"""Pages in headless Chromium: what a script finds in one when it has pressed keys and moved
sliders.
"""

import html
import json
import re
import shutil
import subprocess

import pytest

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run"
    " --disable-background-networking "
)
OPTIONS += (
    "--disable-component-update --disable-sync --disable-dev-shm-usage --virtual-time-budget=5000"
    " --dump-dom"
)
WIDTHS = {"phone": 360, "desk": 1280}

# What tests call in a page.
HELP = """
const press = (key) =>
  document.body.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const move = (label, at) => {
  const input = document.querySelector(`input[aria-label="${label}"]`);
  input.value = at;
  input.dispatchEvent(new Event("input"));
};
const take = (number, name) => {
  const choose = document.querySelectorAll("select")[number];
  choose.value = name;
  choose.dispatchEvent(new Event("change"));
};
const texts = (selector) =>
  [...document.querySelectorAll(selector)].map((each) => each.textContent);
const count = (selector) => document.querySelectorAll(selector).length;
"""


def look(page, script, folder, width="desk", dark=False):
    """Return what a script returns in a page, with how wide the page is, its background, and the
    errors in it.

    Args:
        page: HTML.
        script: the body of a function that returns an object.
        folder: for files.
        width: one of `WIDTHS`.
        dark: whether the user likes it dark.
    """
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here")
    asked = (
        f"<script>{HELP}; const tell = () => {{ let found; try {{ found = (() => {{ {script} }})();"
        " } catch (error) { found = { error: String(error) }; } found.width ="
        " document.documentElement.scrollWidth; found.paper ="
        " getComputedStyle(document.body).backgroundColor; found.errors = window.wrong;"
        " parent.document.getElementById('found').textContent = JSON.stringify(found); };"
        " addEventListener('load', () => setTimeout(tell, 50));</script>"
    )
    caught = (
        "<script>window.wrong = []; addEventListener('error', (event) =>"
        " window.wrong.push(event.message));</script>"
    )
    inner = html.escape(
        page.replace("<head>", f"<head>{caught}").replace("</body>", f"{asked}</body>")
    )
    file = folder / "frame.html"
    file.write_text(
        f'<pre id="found"></pre><iframe srcdoc="{inner}"'
        f' style="border:0;width:{WIDTHS[width]}px;height:9in"></iframe>'
    )
    words = [CHROMIUM, *OPTIONS.split(), "--window-size=1400,1000"]
    words += [f"--blink-settings=preferredColorScheme={0 if dark else 1}", file.as_uri()]
    text = _start(words, folder / "user-1") or _start(words, folder / "user-2")
    if not text:
        file.write_text('<pre id="found">1</pre>')
        if not _start(words, folder / "user-3"):
            pytest.skip("Chromium does not come to the end of an empty page")
    assert text, "Chromium has not come to the end of the page, twice"
    result = json.loads(html.unescape(text))
    assert not result.pop("errors") and "error" not in result, result
    assert result.pop("width") <= WIDTHS[width], "the page is wider than its window"
    assert (sum(map(int, re.findall(r"\d+", result.pop("paper"))[:3])) < 200) == dark
    return result


def _start(words, user):
    """Return what the page told; nothing if Chromium was too slow, or died: on a busy machine it
    does.
    """
    try:
        ran = subprocess.run(
            [*words, f"--user-data-dir={user}"], capture_output=True, text=True, timeout=45
        )
    except subprocess.TimeoutExpired:
        return ""
    text = re.search(r'<pre id="found">(.+?)</pre>', ran.stdout, re.DOTALL)
    return text[1] if text else ""
