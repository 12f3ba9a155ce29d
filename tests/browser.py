"""A headless chromium that opens a page, driven over its own pipe: nothing more is needed to drive it."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--remote-debugging-pipe",
)  # fmt: skip
HEIGHT = 900
# it reads requests from its file 3 and writes answers to its file 4
START = """
import fcntl, os, sys
given = [fcntl.fcntl(int(each), fcntl.F_DUPFD, 10) for each in sys.argv[1:3]]
for wanted, each in zip((3, 4), given):
    os.dup2(each, wanted)
    os.close(each)
os.execv(sys.argv[3], sys.argv[3:])
"""


def executable() -> str:
    """Where chromium is; the test skips where it is not."""
    for name in NAMES:
        found = shutil.which(name)
        if found is not None:
            return found
    pytest.skip("chromium is not installed")


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser with an empty profile, gone at the end."""
    where = executable()
    read, requests = os.pipe()
    answers, write = os.pipe()
    command = [where, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    program = subprocess.Popen(
        [sys.executable, "-c", START, str(read), str(write), *command],
        pass_fds=(read, write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(read)
    os.close(write)
    try:
        with os.fdopen(requests, "wb", buffering=0) as out, os.fdopen(answers, "rb") as back:
            yield Browser(_Pipe(out, back))
    finally:
        program.terminate()
        program.wait(timeout=30)


class _Pipe:
    """Requests and answers as JSON, each ended by a zero byte. What happens between is kept."""

    def __init__(self, out: Any, back: Any):
        self.out, self.back = out, back
        self.asked = 0
        self.happened: list[dict[str, Any]] = []

    def ask(self, method: str, session: str | None = None, **given: Any) -> dict[str, Any]:
        self.asked += 1
        request = {"id": self.asked, "method": method, "params": given}
        self.out.write(json.dumps(request | ({"sessionId": session} if session else {})).encode() + b"\0")
        while (said := self.read()).get("id") != self.asked:
            self.happened.append(said)
        if "error" in said:
            raise RuntimeError(f"{method}: {said['error']['message']}")
        return cast("dict[str, Any]", said["result"])

    def until(self, method: str) -> None:
        """Waits for an event, unless it has happened already."""
        while not any(each.get("method") == method for each in self.happened):
            self.happened.append(self.read())

    def read(self) -> dict[str, Any]:
        found = bytearray()
        while (byte := self.back.read(1)) != b"\0":
            if not byte:
                raise RuntimeError("chromium has ended.")
            found += byte
        return cast("dict[str, Any]", json.loads(found))


class Browser:
    def __init__(self, pipe: _Pipe):
        self.pipe = pipe

    def open(self, file: Path, width: int, dark: bool = False) -> Page:
        """A page of a file, in a window so many pixels wide."""
        target = self.pipe.ask("Target.createTarget", url="about:blank")["targetId"]
        session = self.pipe.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self.pipe, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.ask(f"{domain}.enable")
        page.ask("Emulation.setDeviceMetricsOverride", width=width, height=HEIGHT, deviceScaleFactor=1,
                 mobile=False)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.pipe.happened.clear()
        page.ask("Page.navigate", url=file.resolve().as_uri())
        self.pipe.until("Page.loadEventFired")
        return page


class Page:
    def __init__(self, pipe: _Pipe, session: str):
        self.pipe, self.session = pipe, session

    def ask(self, method: str, **given: Any) -> dict[str, Any]:
        return self.pipe.ask(method, self.session, **given)

    def value(self, script: str) -> Any:
        """What an expression gives in the page."""
        said = self.ask("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in said:
            raise RuntimeError(said["exceptionDetails"]["exception"]["description"])
        return said["result"].get("value")

    @property
    def complaints(self) -> list[str]:
        """What scripts threw, and what was written to the console or logged as an error."""
        self.value("1")  # what was said until now has arrived then
        kinds = {
            "Runtime.exceptionThrown": lambda p: str(p["exceptionDetails"]),
            "Runtime.consoleAPICalled": lambda p: str(p["args"]) if p["type"] in ("error", "warning") else "",
            "Log.entryAdded": lambda p: p["entry"]["text"] if p["entry"]["level"] == "error" else "",
        }
        said = [kinds[e["method"]](e["params"]) for e in self.pipe.happened if e.get("method") in kinds]
        return [each for each in said if each]

    @property
    def requested(self) -> list[str]:
        """Every address that was asked for."""
        return [
            event["params"]["request"]["url"]
            for event in self.pipe.happened
            if event.get("method") == "Network.requestWillBeSent"
        ]

    def picture(self, file: Path) -> None:
        """Writes a PNG of the whole page."""
        shot = self.ask("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        self.ask("Page.close")
