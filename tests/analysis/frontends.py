"""circuit-tracer's own frontend, to judge exports by: fetched once by hand, served on loopback, opened in headless Chromium.

    python -m tests.analysis.frontends

1. That command puts circuit-tracer's wheel (unpacked, never installed) and npm's copies of the scripts that its page loads from
   elsewhere into FOLDER (of SWD_LENS_FRONTENDS, or frontends/ beside the repository). Tests fetch nothing.
2. `page` is a copy of the wheel's page in which those scripts are local, and every complaint is kept.
3. `opened` serves that and an exported folder with the wheel's own server, in a process of its own, and lets judge.js look.
"""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

from tests.chromium import CHROMIUM
from tests.report.gallery import RECORDER, found_by, run_chromium

LOOPBACK = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
FOLDER = Path(os.environ.get("SWD_LENS_FRONTENDS", Path(__file__).resolve().parents[3] / "frontends"))
WHEEL, NPM = FOLDER / "circuit_tracer", FOLDER / "node_modules"
# What the page loads from elsewhere -> npm's copies; none: not needed to look at a graph.
SCRIPTS = {
    "hotserver-client-ws.js": (),
    "npy_v0.js": (),
    "lib/d3.js": ("d3/dist/d3.min.js",),
    # The version on npm asks d3 for `nest`, which d3 has no longer.
    "jetpack_2024-07-20.js": ("d3-collection/dist/d3-collection.min.js", "d3-jetpack/build/d3-jetpack.cjs"),
    "dagre.min.js": ("dagre/dist/dagre.min.js",),
    "pako.min.js": ("pako/dist/pako.min.js",),
}
PACKAGES = ("d3@7.9.0", "d3-collection@1.0.7", "d3-jetpack@2.2.1", "dagre@0.8.5", "pako@2.1.0")
# The page has a jetpack of its own, newer than npm's: what that one lacks.
ADAPTER = """<script>{
const conventions = d3.conventions;
d3.conventions = given => {
  const c = conventions(given);
  c.drawAxis = svg => d3.drawAxis({ ...c, svg: svg || c.svg });
  return c;
};
}</script>"""
# The wheel's package brings a model's libraries with it; its server needs none of them.
SERVER = """
import functools, http.server, importlib.machinery, socketserver, sys, types
wheel, page, data = sys.argv[1:]
package = types.ModuleType("circuit_tracer")
package.__path__ = [wheel]
package.__spec__ = importlib.machinery.ModuleSpec("circuit_tracer", None, is_package=True)
package.__spec__.submodule_search_locations = [wheel]
frontend = types.ModuleType("circuit_tracer.frontend")
frontend.__path__ = [wheel + "/frontend"]
sys.modules |= {"circuit_tracer": package, "circuit_tracer.frontend": frontend}
from circuit_tracer.frontend.local_server import CircuitGraphHandler
handler = functools.partial(CircuitGraphHandler, frontend_dir=page, data_dir=data)
with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
    print(server.server_address[1], flush=True)
    server.serve_forever()
"""


def missing() -> str | None:
    """What is not there to open the frontend with; None where all is."""
    if CHROMIUM is None:
        return "needs chromium (apt-get install chromium)"
    scripts = [NPM / script for scripts in SCRIPTS.values() for script in scripts]
    there = all(path.exists() for path in (WHEEL / "frontend" / "assets" / "index.html", *scripts))
    return None if there else f"needs circuit-tracer's frontend in {FOLDER}: python -m tests.analysis.frontends"


def page(folder: Path) -> Path:
    """The frontend with local scripts, and judge.html to look at it from."""
    shutil.copytree(WHEEL / "frontend" / "assets", folder)
    index = folder / "index.html"
    text = index.read_text(encoding="utf-8")
    for tag, address in re.findall(r"(<script src='(https://[^']+)'></script>)", text):
        copies = [Path(own) for own in next(local for name, local in SCRIPTS.items() if address.endswith(name))]
        for own in copies:
            shutil.copy(NPM / own, folder / own.with_suffix(".js").name)
        local = "".join(f"<script src='./{own.with_suffix('.js').name}'></script>" for own in copies)
        text = text.replace(tag, local + (ADAPTER if "jetpack" in address else ""))
    assert "src='https://" not in text
    index.write_text(text.replace("<title>", f"{RECORDER}<title>", 1), encoding="utf-8")
    judge = (Path(__file__).parent / "judge.js").read_text(encoding="utf-8")
    (folder / "judge.html").write_text(f"<!doctype html><body><script>{judge}</script></body>", encoding="utf-8")
    return folder


def opened(export: Path, query: str, folder: Path, picture: Path | None = None) -> dict[str, Any]:
    """What judge.js finds in circuit-tracer's page of an exported folder.

    Args:
        query: behind the page's address, see `ExportedGraph.query`.
        folder: for the page and the browser's profile.
        picture: where to put a picture of the page.
    """
    command = [sys.executable, "-c", SERVER, str(WHEEL), str(page(folder / "page")), str(export.resolve())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = f"http://127.0.0.1:{int(server.stdout.readline())}"
            if picture is not None:
                options = [f"--screenshot={picture}", "--window-size=1500,1000", "--virtual-time-budget=8000"]
                run_chromium(folder / "profile", [*options, LOOPBACK], f"{address}/index.html?{query}")
            options = ["--dump-dom", "--window-size=1600,1200", "--virtual-time-budget=60000"]
            done = run_chromium(folder / "profile", [*options, LOOPBACK], f"{address}/judge.html?{query}")
        finally:
            server.terminate()
    shouted = [line for line in done.stderr.splitlines() if "CONSOLE" in line and re.search("Uncaught|Failed", line)]
    return {**found_by(done), "shouted": shouted}


def _fetch() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "circuit-tracer==0.5.0", "--no-deps", "-d", str(FOLDER)]
    subprocess.run(pip, check=True)
    with zipfile.ZipFile(next(FOLDER.glob("circuit_tracer-*.whl"))) as wheel:
        wheel.extractall(FOLDER)
    npm = ["npm", "install", "--prefix", str(FOLDER), "--ignore-scripts", "--no-audit", "--no-fund", *PACKAGES]
    subprocess.run(npm, check=True)
    print(missing() or f"{FOLDER} is ready")


if __name__ == "__main__":
    _fetch()
