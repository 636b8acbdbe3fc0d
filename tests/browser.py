"""A real Chromium without a window, spoken to over a pipe in the words of the DevTools protocol: no driver, no port."""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name)) is not None),
    None,
)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe"),
)
# The browser looks for its pipes at the descriptors 3 and 4.
START = """
import os, sys
for number, place in zip(sys.argv[1:3], (3, 4)):
    os.dup2(int(number), place)
    os.set_inheritable(place, True)  # also where it was there already
os.execv(sys.argv[3], sys.argv[3:])
"""
SECONDS = 180.0  # for one answer; a machine may be busy


class Browser:
    """One page.

    Args:
        home: An empty folder for what the browser keeps.
        width: Of the window, in pixels.
        is_dark: Whether the person prefers dark pages.
    """

    def __init__(self, home: Path, width: int = 1280, is_dark: bool = False) -> None:
        assert CHROMIUM is not None
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={home}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, str(theirs_in), str(theirs_out), *command],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._number, self._read, self._session = 0, b"", ""
        self.events: list[dict[str, Any]] = []
        (page,) = (found for found in self.ask("Target.getTargets")["targetInfos"] if found["type"] == "page")
        self._session = self.ask("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self._session = ""
        try:
            self.ask("Browser.close")
            self._process.wait(SECONDS)
        finally:
            self._process.kill()
            self._process.wait()
            os.close(self._in)
            os.close(self._out)

    def ask(self, method: str, **arguments: Any) -> Any:
        """Call a method of the protocol; what happens meanwhile is kept in `events`."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": arguments}
        os.write(
            self._out, json.dumps(message | ({"sessionId": self._session} if self._session else {})).encode() + b"\0"
        )
        while (answer := self._next()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._in], [], [], SECONDS)
            assert ready, "the browser does not answer"
            part = os.read(self._in, 1 << 20)
            assert part, "the browser has ended"
            self._read += part
        message, _, self._read = self._read.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def open(self, page: Path | str) -> None:
        """Load a page, a file or an address, and wait until it is there."""
        self.events.clear()
        self.ask("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def photograph(self, file: Path) -> None:
        """Write the whole page as a PNG."""
        size = self.ask("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": self.evaluate("innerWidth"), "height": size["height"], "scale": 1}
        made = self.ask("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        file.write_bytes(base64.b64decode(made["data"]))

    def move_to(self, x: float, y: float) -> None:
        """Move the mouse there, as a person would."""
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds."""
        end = time.monotonic() + SECONDS
        while not holds():
            assert time.monotonic() < end, "it never held"
            time.sleep(0.02)

    @property
    def complaints(self) -> list[Any]:
        """Errors and warnings of the page."""
        kinds = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
        return [event["params"] for event in self.events if event["method"] in kinds]

    @property
    def requests(self) -> list[str]:
        """Every address that the page asked for."""
        sent = [event["params"] for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [params["request"]["url"] for params in sent]
