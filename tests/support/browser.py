"""Drives headless Chromium over its debugging pipe, so that a test sees a page as a reader does."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One page of a headless Chromium.

    Attributes:
        said: what the page's console, its exceptions and the browser's log said.
        requests: addresses that the page asked for.
    """

    def __init__(self, profile: Path) -> None:
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        options = f"--headless=new --no-sandbox --disable-gpu --remote-debugging-pipe --user-data-dir={profile}"

        def as_3_and_4() -> None:  # the descriptors that Chromium reads from and writes to
            reader, writer = os.dup(theirs_in), os.dup(theirs_out)
            os.dup2(reader, 3)
            os.dup2(writer, 4)

        self._process = subprocess.Popen(
            [str(CHROMIUM), *options.split(), "about:blank"],
            preexec_fn=as_3_and_4, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._numbers, self._left, self._session = itertools.count(1), b"", ""
        self.said: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends a command of the DevTools protocol, and returns its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        return self._until(lambda message: message.get("id") == number)["result"]

    def open(self, page: Path) -> None:
        """Loads a file, and waits until it is loaded."""
        self.said, self.requests = [], []
        self.call("Page.navigate", url=page.resolve().as_uri())
        self.until_loaded()

    def until_loaded(self) -> None:
        """Waits until the page has loaded, or has loaded itself again."""
        self._until(lambda message: message.get("method") == "Page.loadEventFired")

    def run(self, script: str) -> Any:
        """Returns the value of a JavaScript expression; raises what it throws."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """Presses and releases a key, such as Tab, Enter or ArrowLeft."""
        codes = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35, "Escape": 27}
        given = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key], "text": "\r" if key == "Enter" else ""}
        self.call("Input.dispatchKeyEvent", type="keyDown", **given)
        self.call("Input.dispatchKeyEvent", type="keyUp", **given)

    def resize(self, width: int, height: int) -> None:
        """Gives the page the screen of a phone or of a desktop."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def _until(self, is_wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        while True:
            while b"\0" not in self._left:
                read = os.read(self._in, 1 << 20)
                assert read, "Chromium has ended"
                self._left += read
            line, _, self._left = self._left.partition(b"\0")
            message = json.loads(line)
            self._note(message.get("method", ""), message.get("params", {}))
            if is_wanted(message):
                assert "error" not in message, message
                return message

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Log.entryAdded":
            self.said.append(params["entry"]["text"])
        elif method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
            self.said.append(json.dumps(params))
