"""The page in a real browser: every plot is drawn, nothing scrolls sideways on a phone, nothing is asked of a network."""

from __future__ import annotations

import io
import json

import pytest
from PIL import Image

from mx_common.gate import Limits, Wanted, judge, read
from mx_common.report import page_of
from tests.pure.test_report import evidence_of
from tests.pure.test_report_page import HOSTILE
from tests.support.browser import Browser
from tests.support.sample_run import loads, refits, write

PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 900}
DRAWN = "document.documentElement.dataset.drawn"
PLOTS = "[...document.querySelectorAll('.plot')]"
SIDEWAYS = "document.scrollingElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("chromium")) as started:
        yield started


def page_at(path, evidence):
    path.write_text(page_of(evidence, judge(evidence, Wanted(), Limits())), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    return page_at(folder / "report.html", read([str(write(folder / "records.jsonl", refits(), loads()))]))


def background(picture):
    """The colour of the page's corner, and how many colours there are in all of it."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    return image.getpixel((1, 1)), len(image.getcolors(1 << 24))


@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_every_plot_is_drawn_and_nothing_scrolls_sideways(browser, page, size):
    opened = browser.open(page, **size)
    opened.wait(DRAWN)
    assert int(opened.value(DRAWN)) == opened.value(f"{PLOTS}.length") == 8
    assert opened.value(f"{PLOTS}.every(plot => plot.querySelectorAll('path, .bars').length > 3)")
    assert opened.value(f"{PLOTS}.every(plot => plot.getBoundingClientRect().width <= innerWidth)")
    assert opened.value("innerWidth") == size["width"]
    assert opened.value(SIDEWAYS) == 0
    opened.value("document.querySelectorAll('details').forEach(one => { one.open = true })")
    assert opened.value(SIDEWAYS) == 0


def test_every_rank_is_a_line_and_floor_and_ceiling_are_drawn(browser, page):
    opened = browser.open(page, **DESK)
    opened.wait(DRAWN)
    names = opened.value("[...document.querySelectorAll('#rates-0 .legendtext')].map(one => one.textContent)")
    assert sorted(names) == sorted([*(f"rank {n}" for n in range(8)), "out of bounds", "floor", "ceiling"])
    assert opened.value("document.querySelectorAll('#rates-0 .scatterlayer .trace').length") == 11


def test_nothing_is_asked_of_a_network_and_nothing_complains(browser, page):
    opened = browser.open(page, **PHONE)
    opened.wait(DRAWN)
    assert opened.requests == [page.resolve().as_uri()]
    assert opened.console == []
    assert opened.value("performance.getEntriesByType('resource').length") == 0
    # the policy holds: what would be asked is refused
    refused = opened.value("fetch('http://127.0.0.1:9/').then(() => 'loaded', error => String(error))")
    assert "Failed to fetch" in refused
    assert any("Content Security Policy" in said for said in opened.console)


def test_light_and_dark_follow_the_device_also_while_the_page_is_open(browser, page):
    opened = browser.open(page, **PHONE)
    opened.wait(DRAWN)
    axis = "getComputedStyle(document.querySelector('#rates-0 .xtick text')).fill"
    light, light_ink = background(opened.picture()), opened.value(axis)
    opened.look(**PHONE, dark=True)
    opened.wait(f"{axis} !== '{light_ink}'")
    dark, dark_ink = background(opened.picture()), opened.value(axis)
    assert sum(light[0]) > 700 > 100 > sum(dark[0])
    assert min(light[1], dark[1]) > 50, "a blank page has one colour"
    assert (light_ink, dark_ink) == ("rgb(27, 31, 36)", "rgb(230, 237, 243)")


FINGER = """(() => {
    const plot = document.querySelector('#rates-0 .nsewdrag');
    const event = (name, y) => {
        const touch = new Touch({ identifier: 1, target: plot, clientX: 195, clientY: y });
        return new TouchEvent(name, { bubbles: true, cancelable: true, touches: [touch], changedTouches: [touch] });
    };
    const events = [event('touchstart', 400), event('touchmove', 300), event('touchend', 300)];
    events.forEach(one => (document.querySelector('.dragcover') ?? plot).dispatchEvent(one));
    return events.some(one => one.defaultPrevented);
})()"""


def test_a_finger_that_moves_over_a_plot_is_left_to_the_page_so_that_it_scrolls(browser, page):
    opened = browser.open(page, **PHONE)
    opened.wait(DRAWN)
    assert opened.value(FINGER) is False


def test_without_scripts_the_tables_hold_the_figures(browser, page):
    opened = browser.open(page, **PHONE, scripts=False)
    tree = json.dumps(opened.call("DOM.getDocument", depth=-1, pierce=True))
    assert "Plots need scripts" in tree
    assert all(figure in tree for figure in ("58.0", "rank 5", "ucx:tcp"))
    assert opened.call("Page.getLayoutMetrics")["cssContentSize"]["width"] == PHONE["width"]
    assert background(opened.picture())[1] > 50


def test_what_a_hostile_record_says_neither_runs_nor_changes_the_page(browser, tmp_path):
    records = [
        {**one, **dict.fromkeys(("model", "host", "transport", "engine"), HOSTILE), "stages_s": {HOSTILE: 1.0}}
        for one in refits(ranks=2, steps=3)
    ]
    opened = browser.open(page_at(tmp_path / "hostile.html", evidence_of(records)), **PHONE)
    opened.wait(DRAWN)
    assert opened.console == []
    assert opened.value("document.querySelectorAll('body img, body b').length") == 0
    assert opened.value("document.querySelectorAll('script').length") == 3
    assert "<img src=x onerror=alert(1)>" in opened.value("document.querySelector('h2').textContent")
    shown = opened.value("[...document.querySelectorAll('.legendtext')].map(one => one.textContent).join()")
    assert "</script><b>" in shown
    assert opened.value(SIDEWAYS) == 0


def test_a_thousand_ranks_are_drawn_too(browser, tmp_path):
    records = [one for one in refits(ranks=1000, steps=4) if "verdict" in one]
    opened = browser.open(page_at(tmp_path / "many.html", evidence_of(records)), **PHONE)
    opened.wait(DRAWN)
    assert opened.value("document.querySelectorAll('#rates-0 .scatterlayer .trace').length") < 20
    assert opened.value(SIDEWAYS) == 0
