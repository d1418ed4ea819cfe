"""Which metrics, labels and values a PromQL expression uses, held against the table of `mx_common.metrics`.

    problems('sum by (path) (rate(mx_transfers_total{verdict="slow"}[5m]))', TABLE) == []

It reads tokens, not grammar: `promtool check rules` does that. Any name that is neither known to PromQL nor in the table is a problem.
"""

from __future__ import annotations

import re

from mx_common._metric import NONE, OTHER
from mx_common.metrics import COMMON_LABELS

TOKEN = re.compile(
    r"""(?P<string>"[^"]*")|(?P<range>\[[^\]]*\])|(?P<number>\d[\w.]*)|(?P<word>[A-Za-z_]\w*)|(?P<sign>=~|!~|!=|>=|<=|==|[-+*/%^(){},=<>])|\s+|(?P<bad>.)"""
)
FUNCTIONS = {"sum", "min", "max", "avg", "count", "topk", "rate", "increase", "histogram_quantile", "clamp_min", "time"}
GROUPING = {"by", "without", "on", "ignoring", "group_left", "group_right"}
OPERATORS = {"and", "or", "unless", "bool"}
# those of the page, and those that a scrape adds
EVERYWHERE = {*COMMON_LABELS, "instance", "job"}


def series(table):
    """Name of a series -> (labels, label -> values where they are fixed)."""
    found = {}
    for metric in table.metrics.values():
        for name in metric.series_names:
            labels = {label.name for label in metric.labels} | EVERYWHERE | ({"le"} if name.endswith("_bucket") else set())
            values = {label.name: {*label.values, OTHER, NONE} for label in metric.labels if label.values}
            found[name] = (labels, values)
    return found


def tokens(expression):
    return [(found.lastgroup, found[0]) for found in TOKEN.finditer(expression) if found.lastgroup]


def used(expression, table):
    """(problems, every label that the metrics of the expression have)."""
    known, wrong, grouped, labels = series(table), [], [], set()
    left = tokens(expression)
    while left:
        kind, text = left.pop(0)
        if kind == "bad":
            wrong.append(f"cannot read {text!r}")
        if kind != "word" or text in OPERATORS | FUNCTIONS:
            continue
        following = left[0][1] if left else ""
        if text in GROUPING:
            grouped += _until(left, ")") if following == "(" else []
        elif following == "(":
            wrong.append(f"no function {text}")
        elif text not in known:
            wrong.append(f"no series {text}")
        else:
            names, values = known[text]
            labels |= names
            matchers = _until(left, "}") if following == "{" else []
            wrong += _matched(text, matchers, names, values)
    wrong += [f"no label {text} to group by" for kind, text in grouped if kind == "word" and text not in labels]
    return wrong, labels


def problems(expression, table):
    """What of an expression does not exist."""
    return used(expression, table)[0]


def _until(left, end):
    """The tokens up to the closing sign, which are taken from `left`."""
    taken = []
    while left and left[0][1] != end:
        taken.append(left.pop(0))
    return taken


def _matched(series_name, matchers, names, values):
    matchers = [token for token in matchers if token[1] not in "{,"]
    for (_, label), (_, sign), (_, value) in zip(*[iter(matchers)] * 3, strict=True):
        if label not in names:
            yield f"{series_name} has no label {label}"
        elif label in values:
            wanted = value.strip('"').split("|") if sign in ("=~", "!~") else [value.strip('"')]
            yield from (f"{series_name} is never {label}={one}" for one in wanted if one not in values[label])
