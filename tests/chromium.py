"""A headless Chromium without a network, driven as a person would: mouse, keys, fingers, sizes of windows, light and dark.

`Browser` speaks the DevTools protocol through a pipe, so that no socket is needed. `Browser.open` shows one page; what its
console or the page itself complains of is kept in `complaints`, and every request that it makes in `requests`.
"""

import base64
import json
import os
import select
import shlex
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_OPTIONS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"]
_OPTIONS += ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--mute-audio"]
_OPTIONS += ["--host-resolver-rules=MAP * ~NOTFOUND", "--remote-debugging-pipe"]
_SECONDS = 60.0
_KEYS = {"Enter": "\r", " ": " ", "Tab": "\t"}  # that a page also gets as text
_CODES = {"Enter": 13, "Tab": 9, "Escape": 27, " ": 32, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


class Browser:
    """One browser with one page.

    Attributes:
        complaints: errors and warnings of the console, uncaught exceptions.
        requests: addresses that the page asked for.
    """

    def __init__(self, folder: Path, *options: str):
        self.folder = folder
        to_read, to_write = os.pipe(), os.pipe()
        command = [CHROMIUM or "", *_OPTIONS, *options, f"--user-data-dir={folder / 'profile'}", "about:blank"]
        shell = f"exec {shlex.join(command)} 3<&{to_read[0]} 4>&{to_write[1]}"
        self.process = subprocess.Popen(
            ["bash", "-c", shell], pass_fds=(to_read[0], to_write[1]), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_read[0])
        os.close(to_write[1])
        self._out, self._in, self._rest = to_read[1], to_write[0], b""
        self._count, self.session = 0, ""
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._events: list[dict[str, Any]] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(t["targetId"] for t in targets if t["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Page.setLifecycleEventsEnabled", enabled=True)
        self.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)
        downloads = {"behavior": "allow", "downloadPath": str(folder), "eventsEnabled": True}
        self.call("Browser.setDownloadBehavior", **downloads)

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *error: Any) -> None:
        self.process.terminate()
        self.process.wait(20)
        os.close(self._out)
        os.close(self._in)

    # ------------------------------------------------------------------ protocol

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command; raises RuntimeError where the browser refuses it."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self.session and not method.startswith(("Target.", "Browser.")):
            message["sessionId"] = self.session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        while True:
            answer = self._read()
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self._keep(answer)

    def _read(self) -> dict[str, Any]:
        end = time.monotonic() + _SECONDS
        while b"\0" not in self._rest:
            if not select.select([self._in], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            part = os.read(self._in, 1 << 20)
            if not part:
                raise RuntimeError("the browser has ended")
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _keep(self, event: dict[str, Any]) -> None:
        method, values = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = values["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning", "assert"):
            self.complaints.append(" ".join(str(arg.get("value", arg.get("description"))) for arg in values["args"]))
        elif method == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
            self.complaints.append(values["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"][:200])
        self._events.append(event)

    # ------------------------------------------------------------------ page

    def size(self, width: int, height: int, *, dark: bool = False, phone: bool = False, scale: float = 1) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone)
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, path: Path, anchor: str = "") -> None:
        """Show a file, wait until it is loaded and drawn."""
        self.call("Page.navigate", url="about:blank")
        self._events.clear()
        self.complaints.clear()
        self.requests.clear()
        # Of this navigation: on a slow machine the blank page's own event comes after the clearing.
        loader = self.call("Page.navigate", url=path.resolve().as_uri() + anchor)["loaderId"]
        while not any(_is_loaded(event, loader) for event in self._events):
            self._keep(self._read())
        self.rest()

    def rest(self, milliseconds: int = 0) -> None:
        """Wait until what was asked for has been drawn."""
        wait = f"setTimeout(done, {milliseconds})" if milliseconds else "done()"
        self.value(
            f"new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => requestAnimationFrame(() => {wait}))))"
        )

    def value(self, script: str) -> Any:
        """What an expression gives in the page (a promise: what it comes to)."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            details = found["exceptionDetails"]
            raise RuntimeError(details.get("exception", {}).get("description") or details["text"])
        return found["result"].get("value")

    # ------------------------------------------------------------------ hands

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        button = {"button": "left", "clickCount": 1} if kind != "mouseMoved" else {}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **{**button, **more})

    def click(self, x: float, y: float, *, shift: bool = False) -> None:
        held = {"modifiers": 8} if shift else {}
        self.mouse("mouseMoved", x, y)
        self.mouse("mousePressed", x, y, **held)
        self.mouse("mouseReleased", x, y, **held)
        self.rest()

    def drag(self, start: tuple[float, float], end: tuple[float, float], steps: int = 12) -> None:
        self.mouse("mouseMoved", *start)
        self.mouse("mousePressed", *start)
        for i in range(1, steps + 1):
            x, y = (a + (b - a) * i / steps for a, b in zip(start, end, strict=True))
            self.mouse("mouseMoved", x, y, button="left", buttons=1)
        self.rest()
        self.mouse("mouseReleased", *end)
        self.rest()

    def key(self, key: str) -> None:
        text = _KEYS.get(key, key if len(key) == 1 else "")
        named: dict[str, Any] = {"key": key, "text": text} if text else {"key": key}
        if key in _CODES:
            named["windowsVirtualKeyCode"] = _CODES[key]
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **named)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.rest()

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)
        self.rest()

    def touch(self, kind: str, *points: tuple[float, float]) -> None:
        fingers = [{"x": x, "y": y, "id": i} for i, (x, y) in enumerate(points)]
        self.call("Input.dispatchTouchEvent", type=kind, touchPoints=fingers)

    # ------------------------------------------------------------------ what it leaves

    def print(self, path: Path) -> Path:
        path.write_bytes(base64.b64decode(self.call("Page.printToPDF", printBackground=True, landscape=False)["data"]))
        return path

    def downloaded(self, name: str, seconds: float = 10.0) -> Path:
        """A file that the page has given to the reader."""
        path, end = self.folder / name, time.monotonic() + seconds
        while not path.is_file() and time.monotonic() < end:
            time.sleep(0.05)
        return path


def _is_loaded(event: dict[str, Any], loader: str) -> bool:
    """Whether this event says that the page of this navigation is loaded."""
    values = event.get("params", {})
    return event.get("method") == "Page.lifecycleEvent" and values["name"] == "load" and values.get("loaderId") == loader
