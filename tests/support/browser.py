"""Debian's Chromium, headless, driven over its debugging pipe: the standard library is all that it needs."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe")  # fmt: skip
PATIENCE = 600.0  # seconds: a hang, on any machine
HAND_OVER = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)


def chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """One page at a time. `errors`: what its console said that is an error, and exceptions."""

    def __init__(self) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="opd-browser-", ignore_cleanup_errors=True)
        here, there = os.pipe(), os.pipe()
        program = chromium()
        assert program is not None
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (here[0], there[1])]  # out of the way of 3 and 4

        launcher = [sys.executable, "-c", HAND_OVER, *map(str, ends), program]
        arguments = [*launcher, *FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"]
        self._process = subprocess.Popen(arguments, pass_fds=ends, stderr=subprocess.DEVNULL)
        for end in (here[0], there[1], *ends):
            os.close(end)
        self._write, self._read = here[1], os.fdopen(there[0], "rb", buffering=0)
        self._held, self._number, self._session, self.errors = b"", 0, None, list[str]()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == number:
                assert "error" not in found, (method, found["error"])
                return dict(found["result"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._held:
            assert select.select([self._read], [], [], PATIENCE)[0], "the browser does not answer"
            part = self._read.read(1 << 16)
            assert part, "the browser has ended"
            self._held += part
        text, self._held = self._held.split(b"\0", 1)
        found: dict[str, Any] = json.loads(text)
        self._note(found)
        return found

    def _note(self, found: dict[str, Any]) -> None:
        method, values = found.get("method"), found.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = values["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and values["type"] in ("error", "assert"):
            self.errors.append(str([one.get("value") for one in values["args"]]))
        elif method == "Log.entryAdded" and values["entry"]["level"] == "error":
            self.errors.append(values["entry"]["text"])

    # What a reader does

    def open(self, address: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        self.errors.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 700
        )
        scheme = "dark" if dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=address)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, waited for where it is a promise."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, (script, found["exceptionDetails"])
        return found["result"].get("value")

    def until(self, script: str) -> None:
        end = time.monotonic() + PATIENCE
        while not self.run(f"!!({script})"):
            assert time.monotonic() < end, f"never true: {script}\n{self.errors}"
            time.sleep(0.05)

    def place(self, selector: str) -> tuple[float, float]:
        """The middle of the first element, scrolled into view."""
        found = self.run(
            f"(() => {{ const node = document.querySelector({json.dumps(selector)}); node.scrollIntoView({{block: 'center', behavior: 'instant'}});"
            " const box = node.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        return float(found[0]), float(found[1])

    def hover(self, selector: str) -> None:
        x, y = self.place(selector)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str) -> None:
        x, y = self.place(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, text=key if len(key) == 1 and kind == "keyDown" else ""
            )

    def screenshot(self, path: Path, *, whole: bool = False, clip: dict[str, float] | None = None) -> None:
        more = {"captureBeyondViewport": True, "clip": clip} if clip else {}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            more = {
                "captureBeyondViewport": True,
                "clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1},
            }
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png", **more)["data"]))

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(PATIENCE)
        self._profile.cleanup()
