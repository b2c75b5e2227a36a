"""A headless Chromium, and a real server on the loopback interface."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PATIENCE = 20.0
CONTRASTS = """
const channels = (color) => (color.match(/[\\d.]+/g) || []).map(Number);
const light = (color) => channels(color).slice(0, 3).map((c) => c / 255)
  .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const behind = (element) => {
  for (let at = element; at; at = at.parentElement) {
    const color = getComputedStyle(at).backgroundColor;
    if (channels(color).length === 3 || channels(color)[3] === 1) return color;
  }
  return "rgb(255, 255, 255)";
};
const ratio = (one, other) => {
  const [low, high] = [light(one), light(other)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
};
const found = [];
for (const each of document.querySelectorAll("body *:not(script)")) {
  const style = getComputedStyle(each), shown = each.getClientRects().length;
  const own = [...each.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
  const what = `${each.tagName} ${each.id} ${each.textContent.slice(0, 30)}`;
  if (own && shown) found.push([what, 4.5, ratio(each.closest("svg") ? style.fill : style.color, behind(each))]);
  if (each.matches("input, textarea, .bar, button")) {
    const around = behind(each.parentElement);
    const edge = Math.max(ratio(style.borderTopColor, around), ratio(style.backgroundColor, around));
    found.push([`edge of ${what}`, 3, edge]);
  }
  if (each.matches(".curve, .target")) found.push([`line of ${what}`, 3, ratio(style.stroke, behind(each))]);
}
return found;
"""


@contextlib.contextmanager
def served(app: Any) -> Iterator[str]:
    """The app on a free port: its origin. On leaving, the port is closed."""
    import uvicorn

    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    try:
        until(lambda: server.started)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        listening.close()


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A driver whose logs hold everything from the console and every request."""
    driver_path = shutil.which("chromedriver")
    if CHROMIUM is None or driver_path is None:
        pytest.skip("want of Chromium and its driver (apt-get install chromium chromium-driver)")
    webdriver = pytest.importorskip("selenium.webdriver")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=900,1200")
    for flag in flags:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(driver_path))
    try:
        yield driver
    finally:
        driver.quit()


def until(condition: Callable[[], Any]) -> Any:
    """What the condition gives once it is true; a failure if that takes too long."""
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
    return found


class Page:
    """The page as its user finds it: by ids, by what has the focus, by what is written there."""

    def __init__(self, driver: Any, origin: str) -> None:
        self.driver, self.origin = driver, origin

    def open(self, name: str) -> Page:
        self.driver.get(f"{self.origin}/{name}")
        return self

    def __getitem__(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0]).textContent", selector)).strip()

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def press(self, *keys: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def back(self) -> None:
        """Shift and Tab."""
        from selenium.webdriver.common.action_chains import ActionChains
        from selenium.webdriver.common.keys import Keys

        ActionChains(self.driver).key_down(Keys.SHIFT).send_keys(Keys.TAB).key_up(Keys.SHIFT).perform()

    def submit(self) -> None:
        from selenium.webdriver.common.action_chains import ActionChains
        from selenium.webdriver.common.keys import Keys

        ActionChains(self.driver).key_down(Keys.CONTROL).send_keys(Keys.ENTER).key_up(Keys.CONTROL).perform()

    def type(self, question: str) -> None:
        self["#question"].clear()
        self["#question"].send_keys(question)

    def ask(self, question: str) -> None:
        """Ask, and wait for the answer or the problem."""
        self.type(question)
        self.submit()
        self.settle()

    def settle(self) -> None:
        until(lambda: self.text("#send") == "Ask" and self.text("#answer") != "Asking…")

    def until_text(self, selector: str, words: str) -> None:
        until(lambda: words in self.text(selector))

    @property
    def focus(self) -> str:
        return str(self.run("return document.activeElement.id || document.activeElement.tagName.toLowerCase()"))

    def quiet(self) -> None:
        """Since the last look: no request to another origin, and nothing in the console (where a violation of the
        policy would be) but the statuses of requests."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"]
        assert [url for url in sent if not url.startswith((f"{self.origin}/", "data:"))] == []
        entries = self.driver.get_log("browser")
        assert [each for each in entries if each["source"] != "network" and each["level"] != "DEBUG"] == []

    def contrasts(self) -> list[tuple[str, float, float]]:
        """Of every text, edge and line that is shown: what it is, the contrast that it needs, the one it has."""
        return [(what, needed, found) for what, needed, found in self.run(CONTRASTS)]

    def look(self, theme: str = "light", width: int = 900, height: int = 1200) -> None:
        features = [{"name": "prefers-color-scheme", "value": theme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
