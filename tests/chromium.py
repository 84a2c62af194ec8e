"""Chromium without a window, driven over the two pipes of its DevTools protocol: no other package is needed."""

from __future__ import annotations

import base64
import ctypes
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")
HOW_TO_GET_IT = "no Chromium on the path: apt-get install chromium (Debian), or make test-report, which does that"
PR_CAPBSET_DROP, CAP_SYS_NICE = 24, 23
SECONDS = 120.0
"""How long an answer may take: the machine may be busy."""


def find() -> str | None:
    """Path of the browser, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser with a profile of its own; a context manager."""

    def __init__(self, profile: str | os.PathLike) -> None:
        path = find()
        if path is None:
            raise FileNotFoundError(HOW_TO_GET_IT)
        commands, self._write = os.pipe()
        self._read, answers = os.pipe()
        # The protocol is spoken on descriptors 3 and 4; high copies first, as the pipes may have got these numbers.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (commands, answers)]

        def place() -> None:
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)
            # As root Chromium puts itself before every other process; without this capability it cannot.
            ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_SYS_NICE, 0, 0, 0)

        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        options += ["--no-first-run", "--disable-background-networking", "--disable-component-update"]
        options += ["--disable-sync", "--disable-extensions", f"--user-data-dir={os.fspath(profile)}"]
        self._process = subprocess.Popen(
            [path, *options, "--remote-debugging-pipe", "about:blank"],
            preexec_fn=place,
            pass_fds=(3, 4),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (commands, answers, *ends):
            os.close(end)
        self._number, self._buffer = 0, b""
        self._target: str | None = None
        self._session: str | None = None
        self.events: list[dict] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._session = None
            self.call("Browser.close")
        except (OSError, TimeoutError):
            self._process.kill()
        self._process.wait(SECONDS)
        os.close(self._write)
        os.close(self._read)

    def call(self, method: str, **parameters: object) -> dict:
        """Call a method of the protocol on the page that was opened last, and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def open(self, page: str | os.PathLike) -> None:
        """Open a file in a new page and wait until it is loaded; `events` then holds what happened on the way."""
        self._session = None
        before = self._target
        self._target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        if before:
            self.call("Target.closeTarget", targetId=before)
        self.events = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=Path(page).resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._next()

    def evaluate(self, expression: str) -> object:
        """The value of an expression on the page, awaited if it is a promise."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"]["exception"].get("description", expression))
        return result["result"].get("value")

    def show(self, width: int, scheme: str, height: int = 900) -> None:
        """Set the width of the window and the colour scheme that the reader prefers."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def click(self, selector: str, number: int = 0) -> None:
        """Click the middle of an element with the mouse."""
        x, y = self.evaluate(
            f"""(() => {{
              const found = document.querySelectorAll({json.dumps(selector)})[{number}];
              found.scrollIntoView({{ block: "center", behavior: "instant" }});
              const box = found.getBoundingClientRect();
              return [box.x + box.width / 2, box.y + box.height / 2];
            }})()"""
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        """Press and release a key: Tab, Enter, Escape."""
        code = {"Tab": 9, "Enter": 13, "Escape": 27}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=code)

    def picture(self, path: str | os.PathLike, whole: bool = False) -> Path:
        """Write what is seen, or the whole page, as a png."""
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done())))")
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(base64.b64decode(data))
        return Path(path)

    @property
    def requests(self) -> list[str]:
        """Addresses that the page asked for, but what it carries itself."""
        sent = [
            event["params"]["request"]["url"] for event in self.events if event["method"] == "Network.requestWillBeSent"
        ]
        return [url for url in sent if not url.startswith("data:")]

    @property
    def errors(self) -> list[str]:
        """What the console was told: errors and warnings, exceptions, what the security policy refused."""
        found = []
        for event in self.events:
            parameters = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(parameters["exceptionDetails"]["text"])
            if event["method"] == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
                found.append(parameters["entry"]["text"])
            if event["method"] == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
                found.append(" ".join(str(argument.get("value")) for argument in parameters["args"]))
        return found

    def _next(self) -> dict:
        """The next message, kept among the events if it is one."""
        end = time.monotonic() + SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError(f"Chromium said nothing for {SECONDS:.0f} s")
            piece = os.read(self._read, 1 << 20)
            if not piece:
                raise OSError("Chromium ended")
            self._buffer += piece
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        if "method" in message and message.get("sessionId") == self._session:
            self.events.append(message)
        return message
