"""The report in a real browser, without a network: it fits a phone and a desktop, and nothing complains."""

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from swd_lens.report import render_report
from swd_lens.study import Run
from tests.report.conftest import HOSTILE, with_cards

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
QUIET += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
# Frames of a phone's and a desktop's width hold the page; the outer page measures them and writes what it finds.
PROBE = """<!doctype html><body>{frames}<script>
const report = {{}};
addEventListener("load", () => {{
  for (const frame of document.querySelectorAll("iframe")) {{
    const page = frame.contentDocument, root = page.documentElement;
    const lost = [...page.querySelectorAll("use")].filter(u => !page.querySelector(u.getAttribute("href")));
    report[frame.width] = [root.scrollWidth - root.clientWidth, page.querySelectorAll("script").length, lost.length,
      frame.contentWindow.performance.getEntriesByType("resource").length];
  }}
  document.body.innerHTML = "<pre>" + JSON.stringify(report) + "</pre>";
}});
</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt-get install chromium)")
def test_fits_every_width_and_loads_nothing(run: Run, tmp_path: Path) -> None:
    page = html.escape(render_report(with_cards(run, HOSTILE)))
    frames = "".join(f'<iframe width="{width}" height="800" srcdoc="{page}"></iframe>' for width in (360, 1200))
    probe = tmp_path / "probe.html"
    probe.write_text(PROBE.format(frames=frames), encoding="utf-8")
    options = [*QUIET, f"--user-data-dir={tmp_path / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom"]
    done = subprocess.run(
        [CHROMIUM or "", *options, probe.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    found = re.search(r"<pre>(.*?)</pre>", done.stdout)
    assert found, done.stderr[-2000:]
    # pixels too wide, scripts, dangling references, resources fetched
    assert found[1] == '{"360":[0,0,0,0],"1200":[0,0,0,0]}'
