"""What a driver asks of an engine, and what it makes of the answers: real HTTP on loopback, a real directory."""

from __future__ import annotations

import http.server
import json
import threading
from functools import partial

import pytest

from mx_common.errors import ConfigError, RefitFailed, SourceLost
from mx_common.refit.drive import Asked, ended_after_failure, post
from tests.refit.conftest import MODEL


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ({"path": "shortcut"}, "refit path 'shortcut': use reshard or staged"),
        ({"only": "*.experts.*"}, "give a list of patterns"),
        ({"only": 5}, "give a list of patterns"),
        ({"only": ["a", 1]}, "give a list of patterns"),
        ({"server": 8001}, "server=8001: give a text"),
        ({"model_name": None}, "model_name=None: give a text"),
        ({"paht": "staged"}, r"unknown refit settings \['paht'\]"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused_by_name(said, wrong):
    with pytest.raises(ConfigError, match=wrong):
        Asked.of(said)


@pytest.mark.parametrize("asked", [Asked(), Asked("org/model", "staged", "h:1", ("a", "b"))])
def test_settings_are_the_same_after_json(asked):
    assert Asked.of(json.loads(json.dumps(asked.as_json()))) == asked


@pytest.mark.parametrize(
    ("only", "taken", "left"),
    [(("*.experts.*",), "model.experts.3.up", "model.norm"), (("a", "b?"), "b1", "A"), (["[ab].w"], "a.w", "c.w")],
)
def test_only_tensors_of_a_pattern_are_wanted(only, taken, left):
    wanted = Asked(only=only).wanted()
    assert wanted(taken)
    assert not wanted(left)
    assert Asked().wanted() is None


def test_a_version_is_asked_for_by_number_once_it_is_ready(directory, trainer):
    asked = Asked(MODEL)
    with pytest.raises(SourceLost):
        asked.ready_version(timeout=0.2)
    trainer(2).publish(5)
    assert asked.ready_version(timeout=5) == 5
    assert Asked(MODEL, server=directory.address).ready_version(5, 5) == 5
    with pytest.raises(SourceLost):
        asked.ready_version(6, timeout=0.2)


def test_what_is_open_is_ended_after_a_failure_only_and_its_own_failure_is_no_matter():
    ended = []

    def end():
        ended.append(1)
        raise RefitFailed("no update is under way")

    with ended_after_failure(end):
        pass
    assert ended == []
    with pytest.raises(RefitFailed, match="the first"), ended_after_failure(end):
        raise RefitFailed("the first")
    assert ended == [1]


def test_what_is_ended_in_several_steps_goes_no_further_than_one_that_fails():
    ended = []

    def end(step):
        ended.append(step)
        if step == "close":
            raise RefitFailed("no answer")

    steps = [partial(end, step) for step in ("forget", "close", "resume")]
    with pytest.raises(RefitFailed, match="the first"), ended_after_failure(*steps):
        raise RefitFailed("the first")
    assert ended == ["forget", "close"]


@pytest.fixture
def engine():
    """An endpoint that answers by path, and what it was asked."""
    asked = []

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            asked.append((self.path, json.loads(body) if body else None))
            status, said = {"/json": (200, b'{"a": 1}'), "/text": (200, b"done"), "/broken": (500, b"rank 1: no")}.get(
                self.path, (404, b"")
            )
            self.send_response(status)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


def test_an_endpoint_is_given_json_and_what_it_says_comes_back(engine):
    url, asked = engine
    assert post(url + "/", "/json", {"version": 7}) == {"a": 1}
    assert post(url, "/text") == "done"
    assert asked == [("/json", {"version": 7}), ("/text", None)]


def test_what_a_failed_endpoint_said_and_what_that_means_is_in_the_error(engine, free_port):
    url, _ = engine
    with pytest.raises(RefitFailed, match=r"/broken answered 500: rank 1: no$"):
        post(url, "/broken", advice=[(404, "start it with --dev")])
    with pytest.raises(RefitFailed, match="/missing answered 404: ; start it with --dev"):
        post(url, "/missing", advice=[(404, "start it with --dev")])
    with pytest.raises(RefitFailed, match=rf"^http://127\.0\.0\.1:{free_port}/json gave no answer .*refused"):
        post(f"http://127.0.0.1:{free_port}/", "/json")
    with pytest.raises(ConfigError, match=r"'127\.0\.0\.1:8000': give it with its scheme"):
        post("127.0.0.1:8000", "/json")
