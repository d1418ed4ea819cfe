"""Writes docs/images/report.png: the report of a made-up run, as a phone shows it, in light and in dark. Needs Chromium (make chromium).

.venv/bin/python -m scripts.report_image
"""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

from PIL import Image

from mx_common.gate import Limits, Wanted, judge, read
from mx_common.report import page_of
from tests.support.browser import Browser
from tests.support.sample_run import refits, write

IMAGE = Path(__file__).parents[1] / "docs" / "images" / "report.png"
SECTIONS = ("header", "#rates-0", "#stages-0")
COLOURS, GAP = 200, 24


def main() -> None:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch, Browser(Path(scratch)) as browser:
        folder = Path(scratch)
        evidence = read([str(write(folder / "records.jsonl", refits()))])
        page = folder / "report.html"
        text = page_of(evidence, judge(evidence, Wanted(), Limits())).replace(f"{scratch}/", "")
        page.write_text(text, encoding="utf-8")
        columns = []
        for dark in (False, True):
            opened = browser.open(page, width=390, height=844, dark=dark)
            opened.wait("document.documentElement.dataset.drawn")
            whole = Image.open(io.BytesIO(opened.picture(whole=True))).convert("RGB")
            columns.append(_column([_cut(whole, opened.value(_box(section))) for section in SECTIONS]))
    height = max(column.height for column in columns)
    image = Image.new("RGB", (sum(column.width for column in columns), height))
    for number, column in enumerate(columns):
        image.paste(column, (number * column.width, 0))
    IMAGE.parent.mkdir(exist_ok=True)
    image.quantize(COLOURS).save(IMAGE, optimize=True)
    print(f"{IMAGE}: {image.width} x {image.height}, {IMAGE.stat().st_size / 1e3:.0f} kB")


def _box(selector: str) -> str:
    """Top and bottom of an element, with the heading that stands over it."""
    return f"""(() => {{
        const shown = document.querySelector("{selector}");
        let top = shown;
        while (top.matches(".plot, .note")) top = top.previousElementSibling;
        return [top.getBoundingClientRect().top + scrollY, shown.getBoundingClientRect().bottom + scrollY];
    }})()"""


def _cut(whole: Image.Image, box: list[float]) -> Image.Image:
    """A section in its whole width; the picture has two pixels for one of the page."""
    return whole.crop((0, int(2 * box[0]), whole.width, int(2 * box[1])))


def _column(parts: list[Image.Image]) -> Image.Image:
    column = Image.new("RGB", (parts[0].width, sum(part.height + GAP for part in parts) + GAP), parts[0].getpixel((0, 0)))
    top = GAP
    for part in parts:
        column.paste(part, (0, top))
        top += part.height + GAP
    return column


if __name__ == "__main__":
    main()
