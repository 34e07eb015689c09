"""A headless Chromium, driven over the DevTools protocol through a pair of pipes.

    with Browser() as browser:
        page = browser.open(path, width=380, dark=True)
        page.click("th button")
        assert page.evaluate("document.title") and not page.problems()

Messages are JSON, each ended by a zero byte (`--remote-debugging-pipe`: the browser reads from file
descriptor 3 and writes to 4), so nothing but the standard library is needed.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = (
    "chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome",
)  # fmt: skip
PATIENCE = 60.0  # seconds until a browser that says nothing is given up
KEYS = {
    "Enter": 13, "Tab": 9, "Escape": 27, " ": 32,
    "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40,
}  # fmt: skip


def find() -> str | None:
    """Where a Chromium is, if there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One process; leaving the block ends it. RuntimeError if none is installed."""

    def __init__(self) -> None:
        program = find()
        if program is None:
            raise RuntimeError(f"no browser: none of {', '.join(NAMES)} is installed")
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        flags = [
            "--headless", "--remote-debugging-pipe", f"--user-data-dir={self._folder.name}",
            "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
            "--force-color-profile=srgb", "--disable-background-networking",
        ]  # fmt: skip
        if os.geteuid() == 0:
            flags.append("--no-sandbox")  # it refuses to run as root otherwise
        (theirs, self._out), (self._in, answers) = os.pipe(), os.pipe()
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (theirs, answers)]  # not 3 or 4
        quiet = [(os.POSIX_SPAWN_OPEN, i, os.devnull, os.O_RDWR, 0) for i in (0, 1, 2)]
        places = [(os.POSIX_SPAWN_DUP2, end, i) for i, end in enumerate(ends, 3)]
        arguments = [program, *flags, "about:blank"]
        self._pid = os.posix_spawn(program, arguments, os.environ, file_actions=quiet + places)
        for end in (theirs, answers, *ends):
            os.close(end)
        self._buffer = b""
        self._count = 0
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._out)  # which ends it
        os.waitpid(self._pid, 0)
        os.close(self._in)
        self._folder.cleanup()

    def call(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        """The answer to a command. RuntimeError if it is an error."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def receive(self) -> dict[str, Any]:
        """The next message, which is noted if it is an event."""
        end = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            data = os.read(self._in, 1 << 20) if ready else b""
            if not data:
                raise RuntimeError("the browser does not answer")
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        if "method" in message:
            self.events.append(message)
        return message

    def open(
        self, address: Path | str, width: int = 1200, height: int = 800, dark: bool = False
    ) -> Page:
        """A new window that shows a file or a URL, once it is loaded."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        page = Page(self, target, attached["sessionId"])
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.resize(width, height)
        page.colours(dark)
        page.load(address)
        return page


class Page:
    """One window. Selectors are those of CSS, and stand for the first element that they find."""

    def __init__(self, browser: Browser, target: str, session: str) -> None:
        self._browser, self._target, self._session = browser, target, session
        self._url = ""
        self.width = 0

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def events(self, *methods: str) -> list[dict[str, Any]]:
        own = (e for e in self._browser.events if e.get("sessionId") == self._session)
        return [e["params"] for e in own if e["method"] in methods]

    def load(self, address: Path | str) -> None:
        self._url = address if isinstance(address, str) else address.resolve().as_uri()
        seen = len(self.events("Page.loadEventFired"))
        self.call("Page.navigate", url=self._url)
        while len(self.events("Page.loadEventFired")) == seen:
            self._browser.receive()

    def resize(self, width: int, height: int = 800) -> None:
        self.width = width
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def colours(self, dark: bool) -> None:
        """Ask for dark or light, and wait until the page was told and has drawn."""
        value = "dark" if dark else "light"
        features = [{"name": "prefers-color-scheme", "value": value}]
        self.evaluate(f"""void (() => {{
            const asked = matchMedia("(prefers-color-scheme: {value})");
            window.told = asked.matches ? null : new Promise(
                (done) => asked.addEventListener("change", done, {{ once: true }}));
        }})()""")
        self.call("Emulation.setEmulatedMedia", features=features)
        self.evaluate("window.told && window.told.then(() => null)")
        self.settle()

    def problems(self) -> list[str]:
        """Errors and warnings of the console, and requests that failed or went elsewhere.

        Requests to the API of the page's own server are expected.
        """
        found = [e["exceptionDetails"]["text"] for e in self.events("Runtime.exceptionThrown")]
        for event in self.events("Runtime.consoleAPICalled"):
            if event["type"] in ("error", "warning", "assert"):
                found.append(str([a.get("value", a.get("description")) for a in event["args"]]))
        found += [str(e["entry"]) for e in self.events("Log.entryAdded")]
        found += [f"failed: {e['errorText']}" for e in self.events("Network.loadingFailed")]
        requests = (e["request"]["url"] for e in self.events("Network.requestWillBeSent"))
        own = (self._url, "data:,")
        return found + [
            f"asked for {url}" for url in requests
            if url not in own and not url.startswith(f"{self._url}v1/")
        ]  # fmt: skip

    def evaluate(self, script: str) -> Any:
        """The value of an expression. RuntimeError if it throws."""
        given = {"expression": script, "returnByValue": True, "awaitPromise": True}
        answer = self.call("Runtime.evaluate", **given)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"]["description"])
        return answer["result"].get("value")

    def settle(self) -> None:
        """Wait until what was changed is drawn."""
        self.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done)))")

    def place(self, selector: str) -> tuple[float, float]:
        """The middle of the first element, scrolled into view."""
        script = f"""(() => {{
            const found = document.querySelector({json.dumps(selector)});
            found.scrollIntoView({{block: "center", behavior: "instant"}});
            const box = found.getBoundingClientRect();
            return [box.x + box.width / 2, box.y + box.height / 2];
        }})()"""
        x, y = self.evaluate(script)
        return x, y

    def point(self, selector: str) -> None:
        """Move the mouse over an element."""
        self._mouse("mouseMoved", *self.place(selector))
        self.settle()

    def click(self, selector: str) -> None:
        at = self.place(selector)
        self._mouse("mouseMoved", *at)
        for kind in ("mousePressed", "mouseReleased"):
            self._mouse(kind, *at, button="left", clickCount=1)
        self.settle()

    def _mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def key(self, name: str) -> None:
        """Press a key: a name of `KEYS`, or a character."""
        event: dict[str, Any] = {"key": name, "windowsVirtualKeyCode": KEYS.get(name, 0)}
        if name in ("Enter", " ") or len(name) == 1:
            event["text"] = "\r" if name == "Enter" else name
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, **event)
            event.pop("text", None)
        self.settle()

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)
        self.settle()

    def screenshot(self, whole: bool = False) -> bytes:
        """What is shown, or the page in its whole length, as PNG."""
        params: dict[str, Any] = {"format": "png"}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
            params |= {"captureBeyondViewport": True, "clip": clip}
        return base64.b64decode(self.call("Page.captureScreenshot", **params)["data"])
