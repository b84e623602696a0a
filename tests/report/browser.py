"""Chromium without a window, through chromedriver's HTTP interface (W3C WebDriver)."""

import base64
import json
import re
import shutil
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
    "--enable-unsafe-swiftshader",
    "--use-angle=swiftshader",
]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
KEYS = {"ArrowRight": "\ue014", "ArrowLeft": "\ue012", "Enter": "\ue007", "Tab": "\ue004"}


class Browser:
    """One browser; a context manager."""

    def __init__(self, profile: Path) -> None:
        if CHROMIUM is None or DRIVER is None:
            raise RuntimeError("chromium and chromedriver are not installed")
        self._driver = subprocess.Popen(
            [DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        port = None
        while port is None:
            line = self._driver.stdout.readline()
            if not line:
                raise RuntimeError("chromedriver does not start")
            found = re.search(r"started successfully on port (\d+)", line)
            port = found and found.group(1)
        self._url = f"http://127.0.0.1:{port}/session"
        options = {"binary": CHROMIUM, "args": [*FLAGS, f"--user-data-dir={profile}"]}
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        try:
            created = self._call("POST", "", {"capabilities": {"alwaysMatch": wanted}})
            self._url += "/" + created["sessionId"]
        except BaseException:
            self._driver.terminate()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        try:
            self._call("DELETE", "")
        finally:
            self._driver.terminate()
            self._driver.wait(timeout=20)
            self._driver.stdout.close()

    def _call(self, method: str, path: str, content: dict | None = None) -> Any:
        data = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(self._url + path, data=data, method=method)
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(json.load(error)["value"]["message"]) from None

    def open(self, file: Path) -> None:
        self._call("POST", "/url", {"url": file.resolve().as_uri()})

    def run(self, script: str, *arguments: Any) -> Any:
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def console(self) -> list[dict[str, Any]]:
        """Messages since the last call."""
        return self._call("POST", "/se/log", {"type": "browser"})

    def click(self, selector: str) -> None:
        self._call("POST", f"/element/{self._find(selector)}/click", {})

    def type(self, selector: str, *keys: str) -> None:
        text = "".join(KEYS.get(key, key) for key in keys)
        self._call("POST", f"/element/{self._find(selector)}/value", {"text": text})

    def text(self, selector: str) -> str:
        return self.run("return document.querySelector(arguments[0]).textContent", selector)

    def _find(self, selector: str) -> str:
        found = self._call("POST", "/element", {"using": "css selector", "value": selector})
        return found[ELEMENT]

    def screen(self, width: int, height: int, *, dark: bool = False, mobile: bool = False) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self._devtools("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._devtools("Emulation.setEmulatedMedia", {"features": [scheme]})

    def picture(self, whole: bool = False) -> bytes:
        """PNG of the window, or of the whole page."""
        parameters = {"format": "png", "captureBeyondViewport": whole}
        return base64.b64decode(self._devtools("Page.captureScreenshot", parameters)["data"])

    def _devtools(self, command: str, parameters: dict[str, Any]) -> Any:
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})
