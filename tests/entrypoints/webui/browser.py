# SPDX-License-Identifier: Apache-2.0
"""A driver that controls headless Chromium through the DevTools protocol without additional
packages: pages, keys, pointers and screenshots.

`CHROMIUM` is the path to the browser, or None if none is installed. Every wait has a deadline, and
`errors` lists the errors that the page has reported.
"""

import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers.waits import exactly, seconds, wait_until
from websockets.sync.client import ClientConnection, connect

CHROMIUM = next(
    filter(
        None,
        map(
            shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
        ),
    ),
    None,
)
WHY_NOT = (
    "no Chromium on PATH (Debian, Ubuntu: `apt install chromium`): the web page cannot be "
    "tested here"
)

_FLAGS = (
    *(
        "--headless=new",
        "--remote-debugging-port=0",
        "--no-first-run",
        "--disable-extensions",
        "--mute-audio",
    ),
    *(
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--disable-component-update",
    ),
    *(
        "--disable-background-timer-throttling",
        "--disable-renderer-backgrounding",
        "--force-color-profile=srgb",
        # Map a host name other than localhost to this machine. For such a host, as for any other
        # machine on a local network, the browser provides no WebCodecs over plain HTTP.
        "--host-resolver-rules=MAP world.test 127.0.0.1",
    ),
)
_KEYS = {" ": ("Space", 32)}


class PageError(AssertionError):
    """Raised if the page does not reach an expected state or reports an error."""


class Page:
    """A browser tab with one page."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._ids = itertools.count(1)
        self.errors: list[str] = []
        self.requested: list[str] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a DevTools method and return its result."""
        number = next(self._ids)
        self._connection.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._connection.recv(timeout=seconds(30)))
            if message.get("id") == number:
                if "error" in message:
                    raise PageError(f"{method}: {message['error']['message']}")
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def _note(self, event: dict[str, Any]) -> None:
        match event.get("method"):
            case "Runtime.exceptionThrown":
                details = event["params"]["exceptionDetails"]
                self.errors.append(
                    details.get("exception", {}).get("description") or details["text"]
                )
            case "Log.entryAdded":
                entry = event["params"]["entry"]
                if entry["level"] == "error":
                    self.errors.append(f"{entry['text']} ({entry.get('url', '')})")
            case "Network.requestWillBeSent":
                self.requested.append(event["params"]["request"]["url"])
            case "Network.webSocketCreated":
                self.requested.append(event["params"]["url"])

    def open(self, url: str) -> None:
        """Load a page and wait until its scripts have run."""
        self.send("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'", timeout_s=20)

    def leave(self) -> None:
        """Clear the page's stored data and navigate away from it."""
        self.send("Network.clearBrowserCookies")
        self.run(
            "document.URL.startsWith('http') && (sessionStorage.clear(), localStorage.clear())"
        )
        self.open("about:blank")

    def run(self, expression: str) -> Any:
        """Return the value of a JavaScript expression. If the value is a promise, await it
        first.
        """
        response = self.send(
            "Runtime.evaluate",
            expression=expression,
            awaitPromise=True,
            returnByValue=True,
            userGesture=True,
        )
        if "exceptionDetails" in response:
            details = response["exceptionDetails"]
            raise PageError(details.get("exception", {}).get("description") or details["text"])
        return response["result"].get("value")

    def call(self, module: str, code: str, *arguments: Any) -> Any:
        """Import one of the page's JavaScript modules and run `code`, a function body in which `m`
        is the module and `a` holds the arguments.
        """
        arguments_json = json.dumps(arguments)
        return self.run(
            f"import({json.dumps(module)}).then(async (m) => {{ const a = {arguments_json}; "
            f"{code} }})"
        )

    def wait_for(self, expression: str, timeout_s: float = 15.0) -> Any:
        """Wait until the expression is true and return its value. If it does not become true in
        time, raise PageError, which lists the page's errors.
        """
        deadline_s = time.monotonic() + seconds(timeout_s)
        while True:
            with contextlib.suppress(PageError):  # for example, between two pages
                if value := self.run(expression):
                    return value
            if time.monotonic() > deadline_s:
                raise PageError(
                    f"not within {timeout_s:g} s: {expression}; errors of the page: {self.errors}"
                )
            exactly(0.05)

    # -- input -------------------------------------------------------------------------------------

    def key(self, kind: str, key: str) -> None:
        """Send a key event.

        Args:
            kind: `keyDown` or `keyUp`.
            key: A letter or a space.
        """
        code, number = _KEYS.get(key, (f"Key{key.upper()}", ord(key.upper())))
        self.send(
            "Input.dispatchKeyEvent", type=kind, key=key, code=code, windowsVirtualKeyCode=number
        )

    def press(self, key: str, hold_s: float = 0.0) -> None:
        self.key("keyDown", key)
        exactly(hold_s)
        self.key("keyUp", key)

    def write(self, text: str) -> None:
        self.send("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        x, y = self.middle_of(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def drag(self, selector: str, dx: float, dy: float) -> None:
        x, y = self.middle_of(selector)
        self.send(
            "Input.dispatchMouseEvent", type="mousePressed", x=x, y=y, button="left", clickCount=1
        )
        for step in (0.5, 1.0):
            where = {"x": x + dx * step, "y": y + dy * step}
            self.send(
                "Input.dispatchMouseEvent", type="mouseMoved", button="left", buttons=1, **where
            )
        self.send(
            "Input.dispatchMouseEvent",
            type="mouseReleased",
            x=x + dx,
            y=y + dy,
            button="left",
            clickCount=1,
        )

    def touch(self, kind: str, *points: tuple[float, float]) -> None:
        """Send a touch event.

        Args:
            kind: `touchStart`, `touchMove` or `touchEnd`.
        """
        self.send(
            "Input.dispatchTouchEvent", type=kind, touchPoints=[{"x": x, "y": y} for x, y in points]
        )

    def middle_of(self, selector: str) -> tuple[float, float]:
        box = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'nearest'}); const b = e.getBoundingClientRect();"
            " return [b.x + b.width / 2, b.y + b.height / 2, b.width]; })()"
        )
        assert box[2] > 0, f"{selector} is not shown"
        return box[0], box[1]

    # -- output ------------------------------------------------------------------------------------

    def phone(self, width: int = 390, height: int = 844) -> None:
        """Emulate a phone with a touch screen."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2,
            mobile=True,
        )
        self.send("Emulation.setTouchEmulationEnabled", enabled=True, maxTouchPoints=5)

    def desktop(self, width: int = 1280, height: int = 760, scale: float = 1) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )
        self.send("Emulation.setTouchEmulationEnabled", enabled=False)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(
            base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"])
        )

    def text(self, selector: str) -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)}).textContent"))


@dataclass(frozen=True)
class _Tab:
    """DevTools ids of a tab and of its browser context. Each browser context has its own cookies
    and storage.
    """

    context: str
    target: str


class Browser:
    """A running Chromium with a new profile.

    One tab is reused for successive pages, because opening a new tab with a new process takes
    longer than most tests. Changes to the tab's window, touch and media settings are undone when
    its DevTools connection ends or when the test leaves the page.
    """

    def __init__(self, popen: "subprocess.Popen[bytes]", port: int, folder: Path) -> None:
        self._popen, self._port, self.downloads = popen, port, folder / "downloads"
        self._resting: _Tab | None = None  # available for the next page

    @contextlib.contextmanager
    def page(self, url: str = "about:blank") -> Iterator[Page]:
        """Yield a tab without cookies or stored data. If another page is open or the previous page
        failed, a new tab is opened.
        """
        tab, self._resting = self._resting or self._new_tab(), None
        try:
            with self._connect(f"/devtools/page/{tab.target}") as connection:
                page = Page(connection)
                page.desktop()
                where = {"browserContextId": tab.context, "downloadPath": str(self.downloads)}
                page.send("Browser.setDownloadBehavior", behavior="allow", **where)
                if url != "about:blank":
                    page.open(url)
                yield page
                page.leave()
        except BaseException:
            self._close(tab)
            raise
        if self._resting is None:
            self._resting = tab
        else:
            self._close(tab)

    def _new_tab(self) -> "_Tab":
        context = self._admin("Target.createBrowserContext")["browserContextId"]
        target = self._admin("Target.createTarget", url="about:blank", browserContextId=context)[
            "targetId"
        ]
        return _Tab(context, target)

    def _close(self, tab: "_Tab") -> None:
        self._admin("Target.disposeBrowserContext", browserContextId=tab.context)

    def _admin(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a DevTools method of the browser itself."""
        with self._connect(self._browser_path()) as connection:
            connection.send(json.dumps({"id": 1, "method": method, "params": params}))
            while (message := json.loads(connection.recv(timeout=seconds(30)))).get("id") != 1:
                pass
        assert "error" not in message, f"{method}: {message['error']}"
        result: dict[str, Any] = message["result"]
        return result

    def videos(self) -> set[Path]:
        """Return the paths of finished downloads. Chromium first creates an empty file with the
        final name and replaces that file when the download is complete.
        """
        return {
            file
            for file in self.downloads.iterdir()
            if file.suffix == ".mp4" and file.stat().st_size
        }

    def _browser_path(self) -> str:
        return (self.downloads.parent / "DevToolsActivePort").read_text().split()[1]

    def _connect(self, path: str) -> ClientConnection:
        return connect(f"ws://127.0.0.1:{self._port}{path}", max_size=None, compression=None)

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(seconds(10))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()


@contextlib.contextmanager
def running_browser(folder: Path) -> Iterator[Browser]:
    """Run Chromium for the duration of the `with` block, with its profile and downloads in
    `folder`.
    """
    assert CHROMIUM is not None, WHY_NOT
    (folder / "downloads").mkdir(parents=True)
    # Chromium's sandbox does not work when Chromium runs as root.
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    command = [CHROMIUM, *_FLAGS, *sandbox, f"--user-data-dir={folder}", "about:blank"]
    with (folder / "chromium.log").open("wb") as log:
        popen = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    browser = None
    try:
        port_file = folder / "DevToolsActivePort"
        _wait(
            lambda: port_file.exists() and port_file.read_text().count("\n") >= 1,
            popen,
            folder / "chromium.log",
        )
        browser = Browser(popen, int(port_file.read_text().split()[0]), folder)
        yield browser
    finally:
        (browser or Browser(popen, 0, folder)).stop()


def _wait(ready: Callable[[], bool], popen: "subprocess.Popen[bytes]", log: Path) -> None:
    wait_until(
        lambda: popen.poll() is not None or ready(),
        60,
        lambda: log.read_text(errors="replace")[-800:],
    )
    if popen.poll() is not None:
        raise PageError(f"Chromium did not start: {log.read_text(errors='replace')[-800:]}")
