"""What `mx envs` promises."""

from __future__ import annotations

import json
import os
import subprocess

from mx_common import envs


def row(mx, name, **variables):
    done = mx("envs", "--json", **variables)
    (found,) = [row for row in json.loads(done.out)["variables"] if row["name"] == name]
    return done.code, found


def test_every_variable_is_listed_with_value_origin_and_validity(mx):
    done = mx("envs", MX_TRANSFER_TIMEOUT="60", MX_VERIFY_DIGEST="off")
    assert done.code == 0
    lines = {words[0]: words[1:] for words in map(str.split, done.out.splitlines()) if words[-1:] == ["yes"]}
    assert set(lines) == set(envs.TABLE)
    assert lines["MX_TRANSFER_TIMEOUT"] == ["60.0", "environment", "yes"]
    assert lines["MX_VERIFY_DIGEST"] == ["0", "environment", "yes"]
    assert lines["MX_HEARTBEAT_SECONDS"] == ["30", "default", "yes"]


def test_a_piped_table_fits_80_columns_with_meanings_too(mx):
    for arguments in (["envs"], ["envs", "--meaning"]):
        assert max(map(len, mx(*arguments, MX_P2P_TOPOLOGY=json.dumps({"rack": "r" * 200})).out.splitlines())) <= 80


def test_a_bad_value_is_named_with_what_is_allowed_and_what_follows(mx):
    done = mx("envs", MX_TRANSFER_TIMEOUT="soon", MX_P2P_LOAD_WEIGHT="nan")
    assert done.code == 1
    assert "not valid: MX_TRANSFER_TIMEOUT='soon' is not a number (allowed: > 0, finite); what needs it stops" in done.out
    assert "not valid: MX_P2P_LOAD_WEIGHT='nan' is not finite" in done.out
    assert "1 is used instead" in done.out


def test_json_tells_a_bad_value_from_the_value_in_force(mx):
    code, found = row(mx, "MX_P2P_MAX_SOURCES", MX_P2P_MAX_SOURCES="0")
    assert code == 1
    assert (found["value"], found["origin"], found["valid"]) == ("3", "environment", False)
    assert "MX_P2P_MAX_SOURCES='0' is out of range" in found["problem"]


def test_bytes_that_are_not_utf_8_are_shown_and_not_used(mx):
    done = mx("envs", MX_MODEL_NAME=os.fsdecode(b"m\xff\xfe"))
    assert done.code == 1
    assert "MX_MODEL_NAME='m\\udcff\\udcfe' is not valid UTF-8" in done.out


def test_a_misspelt_variable_is_listed_with_the_one_that_was_meant(mx):
    done = mx("envs", MX_TRANSFER_TIMEOUTS="60")
    assert done.code == 0
    assert "not a variable of this pack: MX_TRANSFER_TIMEOUTS; did you mean MX_TRANSFER_TIMEOUT?" in done.out


def test_help_and_version_need_no_valid_environment(mx):
    assert mx("--version", MX_RPC_TIMEOUT="soon").out.startswith("mx-adapters ")
    for command in ("server", "sources", "explain", "doctor", "envs"):
        done = mx(command, "--help", MX_RPC_TIMEOUT="soon")
        assert done.code == 0
        assert "Examples:" in done.out


def test_wrong_usage_ends_with_code_64_and_nothing_on_stdout(mx):
    for arguments in (["bogus"], ["envs", "--bogus"], ["explain"], ["explain", "m", "--rank", "first"]):
        done = mx(*arguments)
        assert (done.code, done.out) == (64, "")
        assert done.err


def test_a_reader_of_the_pipe_that_leaves_early_causes_no_traceback(environment, mx_path):
    command = f'"{mx_path}" envs --json | head -n 1'
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "{\n"
    assert done.stderr == ""
