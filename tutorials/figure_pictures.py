"""Draws the pictures of the interactive figures, for print and for readers without scripts, and
puts changed figures into the notebooks that hold them, without executing these:

    python tutorials/figure_pictures.py [NAME ...]
    python tutorials/figure_pictures.py --notebooks

Needs chromium. Each picture is docs/_static/figures/NAME.png, 700 pixels wide, in 48 colours.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
from PIL import Image, ImageChops

FOLDER = Path(__file__).parents[1] / "docs/_static/figures"
WIDTH = 700
HIDE = (
    "<style>.fl-alone { padding: 0; max-width: none } .fl-figure > h2, .fl-try { display: none }"
    "</style>"
)


def draw(name: str, browser: str) -> None:
    """Draw the picture of a figure with `browser`."""
    with tempfile.TemporaryDirectory() as folder:
        page, shot = FOLDER / f"{name}-picture.html", Path(folder) / "shot.png"
        text = (FOLDER / "index.html").read_text().replace("</head>", f"{HIDE}</head>")
        page.write_text(text)
        try:
            command = [
                browser,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
            ]
            command += [f"--user-data-dir={folder}/profile", "--virtual-time-budget=20000"]
            command += [f"--window-size={WIDTH},1400", f"--screenshot={shot}"]
            subprocess.run(
                [*command, f"{page.as_uri()}?figure={name}"], check=True, capture_output=True
            )
        finally:
            page.unlink()
        image = Image.open(shot).convert("RGB")
        box = ImageChops.difference(image, Image.new("RGB", image.size, "white")).getbbox()
        image = image.crop((0, 0, WIDTH, (box[3] if box else 100) + 6))
        small = image.quantize(48, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        small.save(FOLDER / f"{name}.png", optimize=True)
        print(f"{name}.png: {(FOLDER / f'{name}.png').stat().st_size:,} bytes")


def renew(path: Path) -> None:
    """Replace the stored figures of a notebook by the present ones."""
    from flowrl_course.figures import interactive

    notebook, changed = nbformat.read(path, as_version=4), False
    for cell in notebook.cells:
        shown = re.search(r"^interactive\(.*\)$", cell.source, re.MULTILINE)
        for output in cell.get("outputs", []) if shown else []:
            data = eval(shown[0], {"interactive": interactive})._repr_mimebundle_()
            changed, output.data = changed or output.data != data, data
    if changed:
        path.write_text(nbformat.writes(notebook))
        print(f"{path}: new figures")


if __name__ == "__main__":
    if sys.argv[1:] == ["--notebooks"]:
        for path in sorted((Path(__file__).parents[1] / "tutorials").rglob("[0-9][0-9]_*.ipynb")):
            renew(path)
        raise SystemExit
    browsers = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
    browser = next(filter(None, browsers), None)
    if browser is None:
        raise SystemExit("needs chromium")
    index = (FOLDER / "index.html").read_text()
    for name in sys.argv[1:] or re.findall(r'data-figure="(.*?)"', index):
        draw(name, browser)
