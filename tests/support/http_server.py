"""A real inference server of any engine in a process group of its own, as whoever sends it requests sees it.

Invariant: `end` leaves none of its processes behind.
"""

from __future__ import annotations

import json
import signal
import time
import urllib.error
import urllib.request

from tests.support.process import Process

__all__ = ["HttpServer"]

# a machine on which other engines run is slow to import one
START_SECONDS = 300


class HttpServer(Process):
    """`command` is run as it is; `url`: where it then answers, `/health` included."""

    def __init__(self, command, url, env):
        self.url = url
        super().__init__(*command, env=env, interpreter=False, group=True)

    def health(self):
        """The status of /health; None when nobody answers."""
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=30) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    def wait_healthy(self, seconds=START_SECONDS):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self.popen.poll() is None, "the server ended:\n" + self.said()[-6000:]
            if self.health() == 200:
                return self
            time.sleep(0.3)
        raise AssertionError(f"not healthy after {seconds} s:\n" + self.said()[-6000:])

    def post(self, path, body=None, seconds=120):
        """The answer. An HTTP error is raised as AssertionError with the server's words."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body or {}).encode(), {"Content-Type": "application/json"}, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path} answers {error.code}: {error.read().decode()}") from None
        return json.loads(text) if text.startswith(("{", "[")) else text

    def get(self, path, seconds=30):
        with urllib.request.urlopen(self.url + path, timeout=seconds) as answer:
            return json.load(answer)

    def ask_to_end(self):
        """To the server alone, which ends its own children."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
        super().ask_to_end()
