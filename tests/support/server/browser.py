"""A headless Chromium, driven by its DevTools protocol over one websocket."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import shutil
import subprocess
import tempfile
import time
from contextlib import ExitStack, suppress
from typing import IO, TYPE_CHECKING, Any, Self

import aiohttp

if TYPE_CHECKING:
    pass

#: Seconds for one thing to happen on a busy machine.
PATIENCE = 15.0
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")

#: Windows virtual key codes of the keys that tests press; Enter and Tab also have a character.
KEYS = {
    "Enter": (13, "\r"),
    "Tab": (9, ""),
    "Escape": (27, ""),
    "ArrowLeft": (37, ""),
    "ArrowRight": (39, ""),
    " ": (32, " "),
}
SHIFT = 8


def find_browser() -> str | None:
    """The path of a Chromium; None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class BrowserError(Exception):
    """The browser, or a script of the page, refuses."""


class Browser:
    """A Chromium process; a context manager. Its methods block: no event loop may be running."""

    def __init__(self, path: str):
        self._path = path
        self._ids = itertools.count(1)
        self._tabs: dict[str, Tab] = {}
        self._cleanup = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            profile = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
            )
            self._loop = asyncio.new_event_loop()
            stack.callback(self._loop.close)
            command = [self._path, "--headless=new", "--remote-debugging-port=0", "--no-sandbox"]
            command += [
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
                "--mute-audio",
            ]
            command += ["--disable-extensions", "--disable-background-networking"]
            command += [f"--user-data-dir={profile}", "about:blank"]
            process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
            assert process.stderr is not None
            stack.callback(_end, process)
            address = _address(process.stderr)
            self._session = self._loop.run_until_complete(self._open(address))
            stack.callback(lambda: self._loop.run_until_complete(self._session.close()))
            self._cleanup = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    async def _open(self, address: str) -> aiohttp.ClientSession:
        session = aiohttp.ClientSession()
        self._socket = await session.ws_connect(address, max_msg_size=0)
        return session

    def tab(self, width: int = 1280, height: int = 800, scheme: str = "light") -> Tab:
        """A new tab, with a session storage of its own."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        tab = Tab(self, attached["sessionId"], context)
        self._tabs[attached["sessionId"]] = tab
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.call(f"{domain}.enable")
        tab.resize(width, height)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        tab.call("Emulation.setEmulatedMedia", features=[feature])
        return tab

    def call(self, method: str, session: str | None = None, /, **params: Any) -> Any:
        """The answer to a command; events that come before it are given to their tabs."""
        return self._loop.run_until_complete(self._call(method, session, params))

    async def _call(self, method: str, session: str | None, params: dict[str, Any]) -> Any:
        number = next(self._ids)
        command: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session is not None:
            command["sessionId"] = session
        await self._socket.send_str(json.dumps(command))
        async with asyncio.timeout(PATIENCE):
            while True:
                message = json.loads((await self._socket.receive()).data)
                if message.get("id") == number:
                    if "error" in message:
                        raise BrowserError(f"{method}: {message['error']}")
                    return message["result"]
                if (tab := self._tabs.get(message.get("sessionId", ""))) is not None:
                    tab.heard(message["method"], message.get("params", {}))


class Tab:
    """One page.

    Attributes:
        problems: errors on its console: exceptions, failed requests, violations of its policy.
        requests: addresses that it has asked for.
    """

    def __init__(self, browser: Browser, session: str, context: str):
        self._browser = browser
        self._session = session
        self._context = context
        self.problems: list[str] = []
        self.requests: list[str] = []

    def heard(self, method: str, params: dict[str, Any]) -> None:
        """Take an event."""
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", details).get("description", str(details)))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.problems.append(str([arg.get("value") for arg in params["args"]]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"{params['entry']['source']}: {params['entry']['text']}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def call(self, method: str, **params: Any) -> Any:
        return self._browser.call(method, self._session, **params)

    def close(self) -> None:
        self._browser.call("Target.disposeBrowserContext", browserContextId=self._context)

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def leave(self) -> None:
        """Go to an empty page: the one before asks its server for nothing more."""
        self.open("about:blank")

    def reload(self) -> None:
        self.js("window.isOld = true")
        self.call("Page.reload")
        self.until("!window.isOld && document.readyState === 'complete'")

    def js(self, expression: str) -> Any:
        """The value of an expression, awaited if it is a promise."""
        result = self.call(
            "Runtime.evaluate",
            expression=expression,
            returnByValue=True,
            awaitPromise=True,
            allowUnsafeEvalBlockedByCSP=True,
        )
        if "exceptionDetails" in result:
            raise BrowserError(result["exceptionDetails"])
        return result["result"].get("value")

    def until(self, expression: str) -> Any:
        """Wait until an expression is true, in JavaScript's sense; returns its value.

        While it raises, or the page is being loaded, it is not.
        """
        end, value = time.monotonic() + PATIENCE, None
        while value in (None, False, 0, ""):
            with suppress(BrowserError):
                value = self.js(expression)
            assert time.monotonic() < end, f"never came true: {expression}\n{self.problems}"
            time.sleep(0.01)
        return value

    def text(self, selector: str = "body") -> str:
        """What is to be read there."""
        return str(self.js(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def until_text(self, selector: str, part: str) -> str:
        """Wait until a text is to be read there; returns all of it."""
        found = f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"
        self.until(f"({found}).includes({json.dumps(part)})")
        return self.text(selector)

    def click(self, selector: str) -> None:
        """Click in the middle of an element with the mouse, as a user would."""
        place = self.until(
            f"""(() => {{
                const node = document.querySelector({json.dumps(selector)});
                if (!node || !node.getClientRects().length) return null;
                node.scrollIntoView({{block: "center", behavior: "instant"}});
                const box = node.getClientRects()[0];
                return [box.x + box.width / 2, box.y + box.height / 2];
            }})()"""
        )
        for kind in ("mousePressed", "mouseReleased"):
            where = {"x": place[0], "y": place[1], "button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, **where)

    def click_text(self, selector: str, text: str) -> None:
        """Click on the last of those elements that has this text, once it can be clicked."""
        found = (
            f"[...document.querySelectorAll({json.dumps(selector)})]"
            f".findLast((node) => !node.disabled && node.innerText.trim() === {json.dumps(text)})"
        )
        self.until(f"((node) => node && (node.click(), true))({found})")

    def hover(self, selector: str) -> None:
        x, y = self.js(
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])"
            f"(document.querySelector({json.dumps(selector)}).getClientRects()[0])"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        code, character = KEYS[key]
        same = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        modifiers = SHIFT if shift else 0
        down = "keyDown" if character else "rawKeyDown"
        self.call("Input.dispatchKeyEvent", type=down, text=character, modifiers=modifiers, **same)
        self.call("Input.dispatchKeyEvent", type="keyUp", modifiers=modifiers, **same)


def _address(stderr: IO[str]) -> str:
    for line in stderr:
        if match := re.search(r"DevTools listening on (ws://\S+)", line):
            return match[1]
    raise AssertionError("the browser has ended")


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
