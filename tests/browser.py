"""Pages of the site in Chromium."""

import html
import json
import re
import shutil
import subprocess

import pytest

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs chromium, to draw the page")
WIDTHS = (390, 1280)
FRAMED = """<!doctype html>
<body style="margin: 0">
<iframe id="page" src="{address}" style="border: 0; width: {width}px; height: 3200px"></iframe>
<pre id="result"></pre>
<script>{script}</script>
"""


def chromium(folder, address, width, script, *options):
    """Open a page from its file, in a frame of `width` pixels next to a script that may use it.
    Returns what the command writes; fails if the page writes to the console.
    """
    page = folder / f"framed-{width}.html"
    page.write_text(FRAMED.format(address=address, width=width, script=script))
    command = [str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu"]
    command += ["--allow-file-access-from-files", f"--user-data-dir={folder / 'profile'}"]
    command += ["--enable-logging=stderr", "--virtual-time-budget=60000", "--hide-scrollbars"]
    command += [f"--window-size={max(WIDTHS)},3200", *options, page.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert "CONSOLE" not in shown.stderr, shown.stderr
    return shown.stdout


def result_of(folder, address, width, script):
    """What the script writes into the page as JSON."""
    shown = chromium(folder, address, width, script, "--dump-dom")
    (text,) = re.findall(r'<pre id="result">(.*?)</pre>', shown, re.DOTALL)
    result = json.loads(html.unescape(text))
    assert "error" not in result, result["error"]
    return result
