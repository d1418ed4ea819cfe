"""An identity survives the wire, so that server and source compute the same id."""

from __future__ import annotations

from dataclasses import fields

from hypothesis import given
from hypothesis import strategies as st

from mx_common.identity import Identity, mx_source_id
from mx_common.wire import p2p
from mx_common.wire.identity import identity_from_proto, identity_to_proto

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
identities = st.builds(
    Identity,
    mx_version=text,
    model_name=text,
    mx_source_type=st.integers(0, 9),
    backend_framework=st.integers(0, 3),
    tensor_parallel_size=st.integers(0, 2**32 - 1),
    extra_parameters=st.dictionaries(text, text, max_size=3),
    revision=text,
    gpu_arch=text,
)


@given(identities)
def test_an_identity_is_the_same_after_the_wire(identity):
    carried = p2p.SourceIdentity.FromString(identity_to_proto(identity).SerializeToString())
    assert identity_from_proto(carried) == identity
    assert mx_source_id(identity_from_proto(carried)) == mx_source_id(identity)


def test_identity_and_message_have_the_same_fields():
    assert [f.name for f in fields(Identity)] == [f.name for f in p2p.SourceIdentity.DESCRIPTOR.fields]
