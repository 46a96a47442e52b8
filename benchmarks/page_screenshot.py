"""A page of results in a real browser, without a screen.

    python -m benchmarks.page_screenshot RESULTS.html PICTURE.png [--dark] [--width 1280]

Opens the page in headless Chromium and takes a picture of all of it. What the page does that it should not, a script's
error or a request to anywhere, is printed and makes the exit status 1.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
MOST_SECONDS = 90


@dataclass(frozen=True)
class Box:
    """Where an element lies in the picture, in pixels."""

    id: str
    left: int
    top: int
    right: int
    bottom: int


def find_browser() -> str | None:
    """The path of a browser, or None."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


def screenshot(page: Path, picture: Path, *, dark: bool = False, width: int = 1280) -> list[str]:
    """Write the picture; what the page did that it should not. Raises RuntimeError without a browser or a picture."""
    height = max((box.bottom for box in boxes(page, width)), default=800) + 400
    with tempfile.TemporaryDirectory() as directory:
        net = Path(directory) / "net.json"
        options = [f"--window-size={width},{height}", f"--screenshot={picture}", f"--log-net-log={net}", *_dark(dark)]
        log = _run(options, page).stderr
        asked = _requests(net.read_text(encoding="utf-8"))
    if not picture.exists():
        raise RuntimeError(f"the browser made no picture of {page}: {log}")
    return [line for line in log.splitlines() if ":CONSOLE" in line] + [f"request to {url}" for url in asked]


def boxes(page: Path, width: int = 1280) -> list[Box]:
    """Where the browser lays out every plot. A copy of the page with a script asks it; the page itself has none."""
    script = (
        "<script>document.title='boxes '+[...document.querySelectorAll('figure')].map(f=>{"
        "const b=f.querySelector('.plot').getBoundingClientRect();"
        "return [f.id,b.left,b.top+scrollY,b.right,b.bottom+scrollY].map(x=>x.toFixed?Math.round(x):x).join(' ')"
        "}).join('|')</script></body>"
    )
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / "page.html"
        text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text(encoding="utf-8"))
        copy.write_text(text.replace("</body>", script), encoding="utf-8")
        dom = _run([f"--window-size={width},800", "--dump-dom"], copy).stdout
    title = dom.partition("<title>boxes ")[2].partition("<")[0]
    found = []
    for name, *numbers in re.findall(r"([^ |]+) (\d+) (\d+) (\d+) (\d+)", title):
        left, top, right, bottom = map(int, numbers)
        found.append(Box(name, left, top, right, bottom))
    return found


def _requests(net_log: str) -> list[str]:
    """Addresses that the page asked for, other than files and data; the browser's own errands have no such origin."""
    found = []
    for line in net_log.splitlines():
        if '"initiator":"file://"' in line or '"initiator":"null"' in line:
            found += re.findall(r'"url":"((?:https?|wss?):[^"]*)"', line)
    return list(dict.fromkeys(found))


def _dark(dark: bool) -> list[str]:
    # 0 is dark, 1 is light in Blink's settings
    return [f"--blink-settings=preferredColorScheme={0 if dark else 1}"]


def _run(options: list[str], page: Path) -> "subprocess.CompletedProcess[str]":
    browser = find_browser()
    if browser is None:
        raise RuntimeError(f"no browser: none of {', '.join(BROWSERS)} is installed; apt-get install chromium")
    with tempfile.TemporaryDirectory() as profile:
        return subprocess.run(
            [
                browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr",
                f"--user-data-dir={profile}", "--host-resolver-rules=MAP * ~NOTFOUND", *options,
                page.resolve().as_uri(),
            ],
            capture_output=True, text=True, timeout=MOST_SECONDS, check=False,
        )  # fmt: skip


def main() -> None:
    """The command."""
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("page", type=Path)
    parse.add_argument("picture", type=Path)
    parse.add_argument("--dark", action="store_true")
    parse.add_argument("--width", type=int, default=1280)
    given = parse.parse_args()
    complaints = screenshot(given.page, given.picture, dark=given.dark, width=given.width)
    for line in complaints:
        print(line, file=sys.stderr)
    print(f"{given.picture}: {len(boxes(given.page, given.width))} charts")
    raise SystemExit(1 if complaints else 0)


if __name__ == "__main__":
    main()
