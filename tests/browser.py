"""A real Chromium without a window, driven over its DevTools pipe by the standard library."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--host-resolver-rules=MAP * ~NOTFOUND", "--remote-debugging-pipe",
    "--window-size=1280,900", "--hide-scrollbars",
)  # fmt: skip


def find() -> str | None:
    """The browser's path, or None."""
    named = os.environ.get("CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab: open a file, run script, press keys, take pictures, and know what it asked for."""

    def __init__(self, write_fd: int, read_fd: int) -> None:
        self.write_fd, self.read_fd = write_fd, read_fd
        self.buffer, self.last, self.session = b"", 0, None
        self.requests: list[str] = []
        self.problems: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params):
        self.last += 1
        message = {"id": self.last, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write_fd, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.last:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def receive(self, timeout_s: float = 30.0):
        while b"\0" not in self.buffer:
            if not select.select([self.read_fd], [], [], timeout_s)[0]:
                raise TimeoutError("the browser does not answer")
            chunk = os.read(self.read_fd, 1 << 16)
            if not chunk:
                raise RuntimeError("the browser went away")
            self.buffer += chunk
        raw, _, self.buffer = self.buffer.partition(b"\0")
        message = json.loads(raw)
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
            case "Runtime.exceptionThrown":
                self.problems.append(message["params"]["exceptionDetails"]["text"])
            case "Log.entryAdded" if message["params"]["entry"]["level"] == "error":
                self.problems.append(message["params"]["entry"]["text"])
        return message

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.body && document.body.dataset.ready === 'yes'")

    def run(self, expression: str):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"]["text"])
        return result["result"].get("value")

    def until(self, condition: str, timeout_s: float = 20.0) -> None:
        end = time.monotonic() + timeout_s
        while not self.run(condition):
            if time.monotonic() > end:
                raise TimeoutError(condition)
            time.sleep(0.02)

    def press(self, key: str, *, shift: bool = False) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, modifiers=8 if shift else 0)

    def picture(self, path: str, width: int = 1280, height: int = 900) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=False)  # fmt: skip
        with open(path, "wb") as file:
            file.write(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextlib.contextmanager
def page(browser: str) -> Iterator[Page]:
    """A tab of a fresh browser with a profile of its own; both are gone afterwards."""
    to_browser, from_browser = os.pipe(), os.pipe()
    # The browser takes commands on descriptor 3 and answers on 4: keep ours out of the way.
    theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (to_browser[0], from_browser[1])]
    move = f"import os, sys; os.dup2({theirs[0]}, 3); os.dup2({theirs[1]}, 4); "
    move += "os.execv(sys.argv[1], sys.argv[1:])"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [sys.executable, "-c", move, browser, *FLAGS, f"--user-data-dir={profile}"],
            pass_fds=theirs, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            for fd in (to_browser[0], from_browser[1], *theirs):
                os.close(fd)
            yield Page(to_browser[1], from_browser[0])
        finally:
            os.close(to_browser[1])
            os.close(from_browser[0])
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


if __name__ == "__main__":  # python tests/browser.py player.html picture.png STEP
    html, picture, step = sys.argv[1:]
    with page(find() or "chromium") as tab:
        tab.open(f"file://{os.path.abspath(html)}")
        tab.run(f"go({int(step)})")
        tab.picture(picture, 1280, 750)
