"""The report in a real browser: it opens without a word on the console, fits a phone, and nothing is cut off."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from qtool.reporting.gather import gather
from qtool.reporting.page import write_report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="no Chromium to open the report in")]

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run",
    "--allow-file-access-from-files", "--enable-logging=stderr", "--virtual-time-budget=4000",
]  # fmt: skip
PROBE = """<!doctype html><body style="margin:0">
<iframe src="report.html" style="width:WIDTHpx;height:900px;border:0"></iframe>
<pre id="found"></pre><script>
addEventListener("load", () => {
  const page = document.querySelector("iframe").contentDocument, cut = [];
  for (const svg of page.querySelectorAll("svg")) {
    const box = svg.getBoundingClientRect();
    for (const text of svg.querySelectorAll("text")) {
      const t = text.getBoundingClientRect();
      if (t.left < box.left - 2 || t.right > box.right + 2 || t.top < box.top - 2 || t.bottom > box.bottom + 2)
        cut.push(text.textContent);
    }
  }
  document.getElementById("found").textContent = JSON.stringify({
    scroll: page.documentElement.scrollWidth, width: page.documentElement.clientWidth, cut,
    pictures: [...page.querySelectorAll("svg")].map(s => s.getBoundingClientRect().height),
    small: Math.min(...[...page.querySelectorAll("svg text")].map(t => t.getBoundingClientRect().height)),
    requests: page.defaultView.performance.getEntriesByType("resource").map(e => e.name),
    title: page.title, paper: page.defaultView.getComputedStyle(page.body).backgroundColor,
  });
});
</script>"""


def look(folder: Path, width: int, *flags: str) -> dict:
    """What the browser makes of the report in a frame of that width; fails on anything said on the console."""
    probe = folder / "probe.html"
    probe.write_text(PROBE.replace("WIDTH", str(width)))
    done = subprocess.run(
        [str(BROWSER), *FLAGS, *flags, f"--user-data-dir={folder / 'profile'}", "--dump-dom", probe.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr, done.stderr
    found = re.search(r'<pre id="found">(.+?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stdout[-500:] + done.stderr[-500:]
    return json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


@pytest.fixture
def folder(finished_run: Path, tmp_path: Path) -> Path:
    out = tmp_path / "out"
    write_report(gather(finished_run), out)
    return out


@pytest.mark.parametrize("width", [360, 1100])
def test_the_report_opens_and_fits(folder, width):
    found = look(folder, width)
    assert found["title"].startswith("net <script>")
    assert found["scroll"] <= found["width"] <= width
    assert found["cut"] == []
    assert len(found["pictures"]) == 8
    assert min(found["pictures"]) > 50
    assert found["small"] >= 9
    assert found["requests"] == []


def test_dark_is_dark_and_light_is_light(folder):
    def brightness(*flags):
        return sum(map(int, re.findall(r"\d+", look(folder, 800, *flags)["paper"])[:3]))

    assert brightness("--blink-settings=preferredColorScheme=0") < 150
    assert brightness("--blink-settings=preferredColorScheme=1") > 700


def test_the_console_is_really_listened_to(folder):
    report = folder / "report.html"
    report.write_text(report.read_text().replace("</main>", '<img src="https://example.invalid/x.png"></main>'))
    with pytest.raises(AssertionError, match="Content Security Policy"):
        look(folder, 800)
