"""The page: one file that loads nothing, runs nothing but its own scripts, and shows whatever a record says as text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

from hypothesis import given, settings
from hypothesis import strategies as st

from mx_common.gate import Limits, Wanted, judge
from mx_common.report import page_of
from mx_common.report.figures import library
from tests.pure.test_gate import BYTES, SLOW, record, run
from tests.pure.test_report import anything, evidence_of, peer

HOSTILE = "</script><b>\N{RIGHT-TO-LEFT OVERRIDE}&lt;'\"<img src=x onerror=alert(1)>"


class Elements(HTMLParser):
    """What a browser would find."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.scripts, self.texts = [], [], [], []
        self._script = False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attributes]
        if tag == "script":
            self.scripts.append("")
            self._script = True

    def handle_endtag(self, tag):
        self._script = self._script and tag != "script"

    def handle_data(self, data):
        if self._script:
            self.scripts[-1] += data
        else:
            self.texts.append(data)


def page(records):
    evidence = evidence_of(records)
    return page_of(evidence, judge(evidence, Wanted(), Limits()))


def without_library(text):
    return text.replace(library(), "")


def test_nothing_in_the_page_leads_out_of_it():
    text = page([*run(of={(1, 2): SLOW}), record(peers=[peer("a", 100.0)])])
    elements = Elements(text)
    assert not {"iframe", "object", "embed", "base", "form", "img", "a"} & set(elements.tags)
    addresses = [
        (tag, value) for tag, name, value in elements.attributes if name in ("src", "href", "srcset", "action", "data")
    ]
    assert addresses == [("link", "data:,")]
    assert not re.search(r"https?:|//[a-z]|@import|url\(", without_library(text))


def test_the_policy_of_the_page_names_its_two_scripts_and_allows_nothing_else():
    elements = Elements(page(run()))
    (policy,) = [
        value for tag, name, value in elements.attributes if tag == "meta" and name == "content" and "default-src" in value
    ]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    data, *scripts = elements.scripts
    digests = [f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts]
    assert rules["default-src"] == "'none'"
    assert rules["script-src"].split(" ") == digests
    assert len(digests) == 2
    assert json.loads(data).keys() == {"rates-0"}
    assert not set("<>&") & set(data)
    assert not [name for _, name, _ in elements.attributes if name.startswith("on")]


def test_what_a_record_says_is_text_wherever_it_stands():
    records = [
        record(rank, step, 50.0, verdict="slow", reason=HOSTILE, model=HOSTILE, path=HOSTILE, host=HOSTILE, engine=HOSTILE,
               transport=HOSTILE, policy=HOSTILE, framework=HOSTILE, stages_s={HOSTILE: 1.0}, peers=[peer(HOSTILE, 50.0)])
        for step in (1, 2) for rank in (0, 1)
    ]  # fmt: skip
    text = page(records)
    plain = Elements(page(run(ranks=2, steps=2)))
    found = Elements(text)
    assert set(found.tags) <= {*plain.tags, "details", "summary"}
    assert len(found.scripts) == len(plain.scripts) == 3
    assert {name for _, name, _ in found.attributes} <= {name for _, name, _ in plain.attributes}
    assert "\N{RIGHT-TO-LEFT OVERRIDE}" not in text
    assert sum("<img src=x onerror=alert(1)>" in said for said in found.texts) > 5
    figures = json.loads(found.scripts[0])
    assert figures.keys() == {"rates-0", "stages-0", "sources-0", "links-0"}
    assert "<b>" not in json.dumps(figures), "plotly reads tags in text"


def test_a_text_without_end_is_cut_in_the_middle():
    text = without_library(page([record(0, step, model="m" * 100_000, peers=[peer("s" * 100_000, 100.0)]) for step in (1, 2)]))
    assert len(text) < 60_000


def test_the_figures_of_every_plot_are_in_tables_too():
    records = [
        record(rank, step, peers=[peer("trainer7", 123.4)], stages_s={"wire": 1.234, "verify": 0.432})
        for step in (1, 2)
        for rank in (3, 4)
    ]
    words = {word for text in Elements(page(records)).texts for word in [text.strip()]}
    assert {"200.0", "123.4", "trainer7", "1.234", "0.432", f"{4 * BYTES / 1e9:.3f}", "100.0%", "stdin:1"} <= words


def test_a_thousand_ranks_over_many_steps_are_a_page_of_bounded_size():
    records = [
        record(
            rank,
            step,
            150.0 + (rank * 7 + step) % 50,
            host=f"n{rank // 8}",
            peers=[peer(f"rank{rank % 64}", 100.0)],
            stages_s={"wire": 0.1},
        )
        for step in range(1, 7)
        for rank in range(1000)
    ]
    text = page(records)
    assert len(without_library(text)) < 600_000
    assert "1,000 ranks; the worst 8 are lines, the band is of all." in text
    assert "The slowest 20 of 1,000 pairs of source and reader" in text


def test_a_page_without_any_record_still_says_so():
    text = page([])
    assert "No record of a transfer was found" in text
    assert "<h1>no evidence</h1>" in text


@settings(max_examples=40, deadline=None)
@given(anything, anything, st.text(max_size=8), st.integers() | st.none())
def test_a_page_is_made_whatever_the_records_say(peers, stages, text, step):
    records = [
        record(rank, step if rank else 1, peers=peers, stages_s=stages, transport=text, model=text, host=text)
        for rank in range(3)
    ]
    elements = Elements(page([*records, record(0, 2, peers=[peer(text, 100.0)], stages_s={text: 1}, model=text)]))
    assert len(elements.scripts) == 3
    json.loads(elements.scripts[0])
