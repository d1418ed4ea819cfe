"""The records that a transfer writes, caught and held against their schemas."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from mx_common import floor
from mx_common.errors import ImpossibleThroughput
from mx_common.floor import WireTransfer, check

SCHEMAS = Path(__file__).parents[2] / "docs" / "schemas"
MARKERS = (floor.MARKER, floor.SLOW_MARKER, floor.IMPOSSIBLE_MARKER)
SCHEMA_OF = dict(zip(MARKERS, (floor.SCHEMA, floor.SLOW_SCHEMA, floor.IMPOSSIBLE_SCHEMA), strict=True))


class Lines(logging.Handler):
    """Keeps what was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, str, dict[str, Any]]] = []

    def emit(self, record: logging.LogRecord) -> None:
        marker, text = record.getMessage().split(" ", 1)
        assert text.splitlines() == [text]
        self.found.append((record.levelno, marker, json.loads(text, parse_constant=refuse_constant)))


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not RFC 8259 JSON")


def run(transfer: WireTransfer) -> list[tuple[int, str, dict[str, Any]]]:
    """The records of one transfer through a logger of its own."""
    lines = Lines()
    with handled_by(lines) as logger, contextlib.suppress(ImpossibleThroughput):
        check(transfer, logger)
    return lines.found


@contextlib.contextmanager
def handled_by(handler: logging.Handler) -> Iterator[logging.Logger]:
    logger = logging.getLogger(f"own-{id(handler)}")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield logger
    finally:
        logger.removeHandler(handler)


def validate(record: dict[str, Any]) -> None:
    validator(record["schema"]).validate(record)


@functools.cache
def validator(name: str) -> Draft202012Validator:
    schema = json.loads((SCHEMAS / f"{name}.json").read_text())
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("no")
