"""What processes of one host know of each other's workers."""

from __future__ import annotations

import os
import signal

from mx_common.directory import DirectoryClient
from mx_common.identity import Identity
from mx_common.load import lives
from mx_common.wire import p2p
from tests.support.process import Process

REMEMBER = (
    "import sys, time\nfrom mx_common.load import lives\n"
    "lives.remember(lives.Life(sys.argv[1]))\nprint('noted')\nsys.stdin.read()"
)


def test_a_worker_is_gone_only_after_its_process_has_ended(tmp_path):
    child = Process("-c", REMEMBER, "w1", env={"MX_RUNTIME_DIR": os.environ["MX_RUNTIME_DIR"]})
    child.expect("noted")
    assert lives.gone() == frozenset()
    child.signal(signal.SIGKILL)
    child.popen.wait(10)
    assert lives.gone() == {"w1"}
    lives.forget("w1")
    assert lives.gone() == frozenset()


def test_an_id_that_is_no_file_name_is_not_noted_and_not_an_error():
    lives.remember(lives.Life("../../etc/passwd"))
    lives.forget("../../etc/passwd")
    assert lives.gone() == frozenset()


def test_a_note_that_cannot_be_read_is_no_opinion(tmp_path):
    lives.remember(lives.Life("w1"))
    (tmp_path / "run" / "workers" / "broken").write_bytes(b"\xff{")
    (tmp_path / "run" / "workers" / "other").write_text('{"worker_id": "other", "surprise": 1}')
    assert lives.gone() == frozenset()


def test_retiring_an_engine_marks_its_workers_stale_and_no_others(directory):
    with DirectoryClient(directory.address) as client:
        for worker_id, instance in (("a0", "engine-a"), ("a1", "engine-a"), ("b0", "engine-b")):
            assigned = client.publish(Identity(model_name="m"), p2p.WorkerMetadata(), worker_id)
            client.update_status(assigned, worker_id, 0, p2p.SOURCE_STATUS_READY)
            lives.remember(lives.Life(worker_id, 0, instance, directory.address, assigned))

        assert lives.retire("engine-a") == 2

        listed = client.list_sources(status=p2p.SOURCE_STATUS_READY).instances
    assert [ref.worker_id for ref in listed] == ["b0"]


def test_retiring_with_a_directory_that_is_down_is_quick_and_quiet():
    lives.remember(lives.Life("w1", 0, "engine", "127.0.0.1:9", "0123456789abcdef"))
    assert lives.retire("engine") == 0


def test_another_container_with_the_same_folder_is_not_judged(tmp_path):
    lives.remember(lives.Life("w1"))
    path = tmp_path / "run" / "workers" / "w1"
    path.write_text(
        path.read_text().replace(f'"pid": {os.getpid()}', f'"pid": {2**22 - 1}').replace('"host": "', '"host": "not-')
    )
    assert lives.gone() == frozenset()
