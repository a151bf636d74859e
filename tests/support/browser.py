"""Headless Chromium through its debugging pipe: loads a page, runs scripts, moves the mouse, takes
screenshots.

Needs no package but the browser: messages are NUL-terminated JSON on file descriptors 3 (to the
browser) and 4 (from it).
"""
import base64
import json
import os
import select
import shutil
import struct
import subprocess
import tempfile
import time
import zlib


# Numbers of keys without a character, as the browser counts them.
KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
# What Chromium answers when the page is replaced while it evaluates an expression.
LEFT = ("Inspected target navigated", "Execution context was destroyed", "Cannot find context")


class LeftPage(RuntimeError):
    """The page that was asked is no longer there."""


def find():
    """The browser's program, or None."""
    return next((path for path in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if path), None)


class Browser:
    """with Browser() as browser: browser.open(path); browser.value("1 + 1")"""

    def __init__(self, width=1400, height=1000):
        self.size = (width, height)
        self.console = []  # errors and warnings of the page
        self.home = "file:"  # requests elsewhere are recorded
        self.number = 0
        self.buffer = b""

    def __enter__(self):
        self.folder = tempfile.mkdtemp(prefix="quadrille-test-browser-")
        to_it, self.to_it = os.pipe()
        self.from_it, from_it = os.pipe()

        def pipes():
            # Through high numbers, so that neither is overwritten before it is moved.
            high = [os.dup2(to_it, 63), os.dup2(from_it, 64)]
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)
            os.closerange(5, 128)

        self.process = subprocess.Popen(  # pylint: disable=consider-using-with
            [find(), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
             "--disable-background-networking", "--disable-extensions", "--hide-scrollbars", "--remote-debugging-pipe",
             f"--user-data-dir={self.folder}", f"--window-size={self.size[0]},{self.size[1]}", "about:blank"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, close_fds=False, preexec_fn=pipes)
        os.close(to_it)
        os.close(from_it)
        self.session = None
        target = next(t for t in self.ask("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self.session = self.ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self.to_it)
        os.close(self.from_it)
        shutil.rmtree(self.folder, ignore_errors=True)

    def receive(self, seconds):
        """The next message, or None after the timeout."""
        end = time.monotonic() + seconds
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.from_it], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                return None
            piece = os.read(self.from_it, 1 << 20)
            if not piece:
                raise RuntimeError("the browser has ended")
            self.buffer += piece
        message, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(message)

    def note(self, message):
        """Records errors, warnings, and requests that leave the machine."""
        method, data = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.console.append(data["exceptionDetails"].get("exception", {}).get("description", "exception"))
        elif method == "Runtime.consoleAPICalled" and data["type"] in ("error", "warning", "assert"):
            self.console.append(" ".join(str(a.get("value", a.get("description"))) for a in data["args"]))
        elif method == "Log.entryAdded" and data["entry"]["level"] in ("error", "warning"):
            self.console.append(data["entry"]["text"])
        elif method == "Network.requestWillBeSent" and not data["request"]["url"].startswith((self.home, "data:", "about:")):
            self.console.append("request to " + data["request"]["url"])

    def ask(self, method, seconds=60, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to_it, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            answer = self.receive(end - time.monotonic())
            if answer is None:
                break
            if answer.get("id") == self.number:
                if "error" in answer:
                    left = any(words in str(answer["error"]) for words in LEFT)
                    raise (LeftPage if left else RuntimeError)(f"{method}: {answer['error']}")
                return answer["result"]
            self.note(answer)
        raise TimeoutError(f"{method}: no answer in {seconds} s")

    def value(self, script, seconds=60):
        """The value of an expression on the page; promises are awaited."""
        result = self.ask("Runtime.evaluate", seconds, expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"].get("exception", {}).get("description", script))
        return result["result"].get("value")

    def open(self, path, dark=False, seconds=60):
        """Loads a file, waits for its self-check and returns it."""
        self.appearance(dark)
        self.ask("Page.navigate", url="file://" + os.path.abspath(path))
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            text = self.value("document.getElementById('self-check')?.textContent ?? ''", seconds)
            if text:
                return json.loads(text)
            time.sleep(0.05)
        raise TimeoutError(f"{path}: the page was not ready within {seconds} s; {self.console}")

    def visit(self, url, dark=False):
        """Loads a page of a server, which is the only one that it may ask."""
        self.home = "/".join(url.split("/")[:3]) + "/"
        self.appearance(dark)
        self.ask("Page.navigate", url=url)

    def appearance(self, dark=False, width=None):
        """The system's theme, and the width of the window, to which the page has adapted on return."""
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        if width:
            self.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
            self.frames()

    def frames(self):
        """Waits until the page has been drawn. Observers of sizes run before the second frame."""
        self.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def until(self, script, seconds=20):
        """The first true value of an expression."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                value = self.value(script)
            except LeftPage:  # the next one is being loaded
                value = None
            if value:
                return value
            time.sleep(0.05)
        raise TimeoutError(f"{script} is still {self.value(script)!r} after {seconds} s; {self.console}")

    def press(self, key, shift=False):
        """A key, by its name: "Tab", "ArrowRight", "Enter", " ", "a"."""
        number = KEYS.get(key, ord(key.upper()) if len(key) == 1 else 0)
        text = {"text": "\r" if key == "Enter" else key} if key == "Enter" or len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code="Space" if key == " " else key, windowsVirtualKeyCode=number,
                     modifiers=8 if shift else 0, **(text if kind == "keyDown" else {}))

    def mouse(self, kind, x, y, **more):
        self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
        self.frames()

    def picture(self, scale=1.0, whole=True):
        """A PNG of the page, or of its visible part."""
        size = self.ask("Page.getLayoutMetrics")["cssContentSize" if whole else "cssVisualViewport"]
        area = {"x": size.get("x", size.get("pageX")), "y": size.get("y", size.get("pageY")),
                "width": size.get("width", size.get("clientWidth")), "height": size.get("height", size.get("clientHeight"))}
        return base64.b64decode(self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole,
                                         clip={**area, "scale": scale})["data"])


def pixels(png):
    """Width, height, rows and bytes per pixel of an 8-bit RGB or RGBA image; each row as bytes."""
    at, packed = 8, b""
    while at < len(png):
        length, kind = struct.unpack(">I4s", png[at:at + 8])
        body = png[at + 8:at + 8 + length]
        if kind == b"IHDR":
            width, height, depth, colour = struct.unpack(">IIBB", body[:10])
            assert depth == 8 and colour in (2, 6)
        elif kind == b"IDAT":
            packed += body
        at += 12 + length
    size = 3 if colour == 2 else 4
    raw, rows, before = zlib.decompress(packed), [], bytearray(width * size)
    for y in range(height):
        start = y * (width * size + 1)
        method, line = raw[start], bytearray(raw[start + 1:start + 1 + width * size])
        for i in range(width * size if method else 0):
            left = line[i - size] if i >= size else 0
            up, corner = before[i], before[i - size] if i >= size else 0
            if method == 1:
                guess = left
            elif method == 2:
                guess = up
            elif method == 3:
                guess = (left + up) // 2
            else:
                distances = (abs(up - corner), abs(left - corner), abs(left + up - 2 * corner))
                guess = (left, up, corner)[distances.index(min(distances))]
            line[i] = (line[i] + guess) & 255
        rows.append(bytes(line))
        before = line
    return width, height, rows, size
