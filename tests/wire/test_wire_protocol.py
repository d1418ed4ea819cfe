"""The checked-in protocol is the one in `tests/data/wire/fields.json`, plus fields from 1000 up, and is what protoc makes now."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import FieldDescriptor

from mx_common.wire import activity, p2p, refit, refit_ext

ROOT = Path(__file__).resolve().parents[2]
EXPECTED = json.loads((ROOT / "tests/data/wire/fields.json").read_text())
FIRST_EXTENSION = 1000
FILES = {"p2p": p2p.DESCRIPTOR, "refit": refit.DESCRIPTOR}
SCALARS = {
    FieldDescriptor.TYPE_STRING: "string",
    FieldDescriptor.TYPE_BYTES: "bytes",
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_FLOAT: "float",
    FieldDescriptor.TYPE_INT64: "int64",
    FieldDescriptor.TYPE_UINT32: "uint32",
    FieldDescriptor.TYPE_UINT64: "uint64",
    FieldDescriptor.TYPE_FIXED64: "fixed64",
}


def type_name(field):
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields
        return f"map<{type_name(key)}, {type_name(value)}>"
    if field.message_type is not None:
        return field.message_type.name
    return field.enum_type.name if field.enum_type is not None else SCALARS[field.type]


def described(field):
    oneof = field.containing_oneof
    synthetic = oneof is not None and oneof.name == f"_{field.name}"
    facts = {"number": field.number, "name": field.name, "type": type_name(field)}
    if field.is_repeated and not facts["type"].startswith("map<"):
        facts["label"] = "repeated"
    if synthetic:
        facts["label"] = "optional"
    elif oneof is not None:
        facts["oneof"] = oneof.name
    if field.GetOptions().deprecated:
        facts["deprecated"] = True
    return facts


def by_number(fields):
    return sorted(fields, key=lambda facts: facts["number"])


@pytest.mark.parametrize("name", FILES)
def test_every_message_and_field_is_that_of_the_protocol(name):
    expected = EXPECTED[name]
    file = FILES[name]
    assert file.package == expected["package"]
    assert set(file.message_types_by_name) == set(expected["messages"])
    for message, fields in expected["messages"].items():
        ours = [described(f) for f in file.message_types_by_name[message].fields if f.number < FIRST_EXTENSION]
        assert by_number(ours) == by_number(fields), message


@pytest.mark.parametrize("name", FILES)
def test_every_enum_value_is_that_of_the_protocol(name):
    ours = {e.name: {v.name: v.number for v in e.values} for e in FILES[name].enum_types_by_name.values()}
    assert ours == EXPECTED[name]["enums"]


@pytest.mark.parametrize("name", FILES)
def test_every_call_is_that_of_the_protocol(name):
    ours = {
        service.name: {m.name: [m.input_type.name, m.output_type.name] for m in service.methods}
        for service in FILES[name].services_by_name.values()
    }
    assert ours == EXPECTED[name]["services"]
    methods = [m for service in FILES[name].services_by_name.values() for m in service.methods]
    assert not any(m.client_streaming or m.server_streaming for m in methods)


def test_what_the_protocol_has_no_call_for_is_a_service_of_our_own_name():
    file = refit_ext.DESCRIPTOR
    assert file.package == "mx.refit"
    assert [service.full_name for service in file.services_by_name.values()] == ["mx.refit.VersionService"]
    assert set(file.services_by_name["VersionService"].methods_by_name).isdisjoint(
        EXPECTED["refit"]["services"]["RefitService"]
    )
    assert not file.enum_types_by_name
    assert all(field.message_type.file in (file, refit.DESCRIPTOR) for field in messages_in(file))


def test_what_is_under_way_is_told_by_a_service_of_our_own_name():
    file = activity.DESCRIPTOR
    assert file.package == "mx.activity"
    assert [service.full_name for service in file.services_by_name.values()] == ["mx.activity.ActivityService"]
    assert not file.enum_types_by_name
    assert all(field.message_type.file is file for field in messages_in(file))
    assert activity.Activity(version=0).HasField("version")
    assert not activity.Activity().HasField("version")


def messages_in(file):
    return [field for message in file.message_types_by_name.values() for field in message.fields if field.message_type]


def test_messages_of_one_file_are_taken_by_the_other():
    version = refit.WeightVersion(uid="v", number=0)
    summary = refit_ext.VersionSummary(version=version)
    assert refit_ext.VersionSummary.FromString(summary.SerializeToString()).version == version
    assert summary.version.HasField("number")
    assert not refit.WeightVersion(uid="v").HasField("number")


def test_a_generated_stub_names_the_modules_that_there_are(generator):
    stubs = {path.stem: text for path, text in generator.render().items() if path.suffix == ".pyi"}
    assert set(stubs) == {"p2p", "refit", "refit_ext", "activity"}
    assert "_pb2 as" not in "".join(line for line in "".join(stubs.values()).splitlines() if line.startswith("import "))
    assert "from mx_common.wire import refit as" in stubs["refit_ext"]


def test_presence_of_a_load_and_of_a_digest_survives_the_wire():
    sent = p2p.UpdateStatusRequest(source_load=0.0)
    assert p2p.UpdateStatusRequest.FromString(sent.SerializeToString()).HasField("source_load")
    assert not p2p.UpdateStatusRequest.FromString(b"").HasField("source_load")
    digest = p2p.TensorDescriptor(name="w", digest=(1 << 64) - 1)
    assert p2p.TensorDescriptor.FromString(digest.SerializeToString()).digest == (1 << 64) - 1
    assert not p2p.TensorDescriptor(name="w").HasField("digest")


def test_nothing_of_ours_is_in_the_default_descriptor_pool():
    with pytest.raises(KeyError):
        descriptor_pool.Default().FindMessageTypeByName("model_express.refit.VersionLease")
    assert p2p.SourceIdentity.DESCRIPTOR.file.pool is not descriptor_pool.Default()


@pytest.fixture
def generator(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import generate_wire

    yield generate_wire
    sys.modules.pop("generate_wire", None)


def test_checked_in_code_is_what_the_compiler_makes_now(generator):
    assert generator.stale(generator.render()) == [], f"run: {generator.COMMAND}"


def test_an_edited_or_missing_generated_file_is_found_stale(generator, tmp_path):
    rendered = generator.render()
    copy = tmp_path / "wire"
    shutil.copytree(generator.WIRE, copy)
    edited, missing, *_ = rendered
    (copy / edited).write_text((copy / edited).read_text() + "\n")
    (copy / missing).unlink()
    assert generator.stale(rendered, copy) == [edited, missing]
