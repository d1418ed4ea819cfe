"""A headless Chromium that nothing leaves: opens a file, answers what scripts ask of its page, takes pictures.

    with Browser(folder) as browser:
        page = browser.open(path, width=390, height=844, dark=True)
        page.value("document.scrollingElement.scrollWidth")
        page.picture()          # PNG

Spoken to over the DevTools protocol, one page at a time.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)
START_SECONDS, ANSWER_SECONDS = 60, 60


def chromium() -> str:
    """The browser's path. Raises RuntimeError where there is none."""
    for name in NAMES:
        if found := shutil.which(name):
            return found
    raise RuntimeError("no Chromium: apt-get install --no-install-recommends chromium, or make chromium")


class Page:
    """What is open. `requests`: addresses that it asked for; `console`: what its scripts and its policy complained about."""

    def __init__(self, socket: ClientConnection) -> None:
        self.requests: list[str] = []
        self.console: list[str] = []
        self.loaded = False
        self._socket, self._numbers = socket, itertools.count(1)

    def call(self, method: str, **given: Any) -> dict[str, Any]:
        """One command of the protocol. Raises RuntimeError for one that is refused, TimeoutError for one without an answer."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": given}))
        while True:
            message = json.loads(self._socket.recv(timeout=ANSWER_SECONDS))
            self._note(message)
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return dict(message["result"])

    def value(self, expression: str) -> Any:
        """What JavaScript says. Raises RuntimeError when it throws."""
        said = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in said:
            raise RuntimeError(f"{expression}: {said['exceptionDetails']}")
        return said["result"].get("value")

    def wait(self, expression: str) -> None:
        """Until `expression` is true. Raises TimeoutError, with the page's complaints."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while not self.value(expression):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{expression} did not become true in {ANSWER_SECONDS} s: {self.console}")
            time.sleep(0.05)

    def look(self, *, width: int = 390, height: int = 844, dark: bool = False, scripts: bool = True) -> None:
        """Be a device of this size; below 600 pixels a phone."""
        phone = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)

    def picture(self, *, whole: bool = False) -> bytes:
        """A PNG of what is in view, or of the whole page."""
        return base64.b64decode(
            self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **self._clip(whole))["data"]
        )

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def _note(self, message: dict[str, Any]) -> None:
        method, given = message.get("method"), message.get("params", {})
        self.loaded = self.loaded or method == "Page.loadEventFired"
        if method == "Network.requestWillBeSent":
            self.requests.append(given["request"]["url"])
        elif method == "Log.entryAdded":
            self.console.append(given["entry"]["text"])
        elif method == "Runtime.exceptionThrown":
            self.console.append(str(given["exceptionDetails"]))


class Browser:
    """One process; it ends with its context."""

    def __init__(self, folder: Path) -> None:
        self._profile = folder / "profile"
        self._log = folder / "chromium.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._socket = contextlib.ExitStack()

    def __enter__(self) -> Browser:
        with self._log.open("wb") as log:
            command = [chromium(), *FLAGS, f"--user-data-dir={self._profile}", "about:blank"]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(20)

    def open(self, path: Path, **look: Any) -> Page:
        """Load a file. Its scripts have run when this returns; what they wait for has not."""
        self._socket.close()
        page = Page(self._socket.enter_context(connect(self._address(), max_size=None, open_timeout=START_SECONDS, proxy=None)))
        for domain in ("Page", "Network", "Log", "Runtime"):
            page.call(f"{domain}.enable")
        page.look(**look)
        page.call("Page.navigate", url=path.resolve().as_uri())
        deadline = time.monotonic() + ANSWER_SECONDS
        while not page.loaded:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{path} was not loaded in {ANSWER_SECONDS} s: {page.console}")
            page.call("Page.getFrameTree")  # what happened meanwhile comes with an answer
            time.sleep(0.02)
        return page

    def _address(self) -> str:
        """Where its first tab listens."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            said = self._log.read_text(errors="replace")
            found = re.search(r"ws://127\.0\.0\.1:(\d+)/", said)
            if found:
                return f"ws://127.0.0.1:{found[1]}/devtools/page/{self._tab(int(found[1]))}"
            if self._process is None or self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"Chromium did not start: {said[-2000:]}")
            time.sleep(0.05)

    def _tab(self, port: int) -> str:
        from urllib.request import ProxyHandler, build_opener

        with build_opener(ProxyHandler({})).open(f"http://127.0.0.1:{port}/json/list", timeout=ANSWER_SECONDS) as answer:
            return next(str(tab["id"]) for tab in json.load(answer) if tab["type"] == "page")
