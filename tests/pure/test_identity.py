"""The id of an identity is the fleet's, and an identity cannot be half wrong."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from typing import Any

import pytest

from mx_common.errors import ConfigError
from mx_common.identity import Identity, mx_source_id


def test_the_id_of_every_golden_identity_is_the_fleets(golden_source_ids: dict[str, Any]) -> None:
    assert mx_source_id(Identity(**golden_source_ids["identity"])) == golden_source_ids["mx_source_id"]


def test_a_plain_mapping_has_the_id_of_the_identity_it_describes(golden_source_ids: dict[str, Any]) -> None:
    assert mx_source_id(golden_source_ids["identity"]) == golden_source_ids["mx_source_id"]


@pytest.mark.parametrize("name", ["torch_version", "cuda_version", "gpu_arch", "compile_config_digest", "triton_version"])
def test_an_optional_field_counts_once_it_says_something(name: str) -> None:
    plain = Identity(model_name="m")
    assert mx_source_id(dataclasses.replace(plain, **{name: ""})) == mx_source_id(plain)
    assert mx_source_id(dataclasses.replace(plain, **{name: "x"})) != mx_source_id(plain)


def test_the_case_of_text_does_not_count() -> None:
    upper = Identity(model_name="A/B", dtype="BF16", extra_parameters={"K": "V"}, gpu_arch="SM90")
    lower = Identity(model_name="a/b", dtype="bf16", extra_parameters={"k": "v"}, gpu_arch="sm90")
    assert mx_source_id(upper) == mx_source_id(lower)


def test_of_parameters_whose_keys_collide_in_lower_case_the_first_by_original_key_wins() -> None:
    assert mx_source_id(Identity(extra_parameters={"a": "2", "A": "1"})) == mx_source_id(Identity(extra_parameters={"a": "1"}))


def test_the_order_of_parameters_does_not_count() -> None:
    assert mx_source_id(Identity(extra_parameters={"a": "1", "b": "2"})) == mx_source_id(
        Identity(extra_parameters={"b": "2", "a": "1"})
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_name", None),
        ("dtype", b"bf16"),
        ("tensor_parallel_size", -1),
        ("tensor_parallel_size", 1.5),
        ("backend_framework", True),
        ("pipeline_parallel_size", 2**32),
        ("extra_parameters", {"a": 1}),
        ("extra_parameters", "a=1"),
    ],
)
def test_a_field_of_the_wrong_type_is_refused_by_its_name(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        Identity(**{field: value})


def test_an_unknown_field_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"modell.*model_name"):
        mx_source_id({"modell": "m"})


def test_an_identity_cannot_be_changed_and_can_be_copied() -> None:
    identity = Identity(model_name="m", extra_parameters={"a": "1"})
    with pytest.raises(dataclasses.FrozenInstanceError):
        identity.model_name = "n"  # type: ignore[misc]
    with pytest.raises(TypeError, match="frozen"):
        identity.extra_parameters["a"] = "2"  # type: ignore[index]
    with pytest.raises(TypeError, match="frozen"):
        identity.extra_parameters.update(a="2")  # type: ignore[attr-defined]
    assert pickle.loads(pickle.dumps(identity)) == copy.deepcopy(identity) == identity
    assert hash(copy.deepcopy(identity)) == hash(identity)
    assert json.loads(json.dumps(dataclasses.asdict(identity)))["extra_parameters"] == {"a": "1"}


def test_the_mapping_an_identity_was_made_from_may_change_afterwards() -> None:
    extra = {"a": "1"}
    identity = Identity(extra_parameters=extra)
    extra["a"] = "2"
    assert identity.extra_parameters == {"a": "1"}
