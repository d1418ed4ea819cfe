"""A box of fused experts as boxes of the checkpoint's, in every way a box may cut it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mx_common.errors import ConfigError
from mx_common.refit.held import Held
from mx_fsdp.experts import split_box, stored_apart

GATE_UP = ["experts.*.gate", "experts.*.up"]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_the_parts_of_a_box_are_the_same_elements_in_the_same_memory(data):
    experts, each, width = data.draw(st.tuples(*[st.integers(1, 5)] * 3))
    fused = torch.arange(experts * 2 * each * width).view(experts, 2 * each, width)
    box = []
    for n in fused.shape:
        low = data.draw(st.integers(0, n - 1))
        box.append(slice(low, data.draw(st.integers(low + 1, n))))
    local = fused[tuple(box)].contiguous()
    held = Held("experts.gate_up", tuple(fused.shape), tuple(s.start for s in box), local)
    seen = []
    for part in split_box(held, GATE_UP):
        _, expert, which = part.name.split(".")
        whole = fused[int(expert), :each] if which == "gate" else fused[int(expert), each:]
        assert part.shape == tuple(whole.shape)
        at = tuple(slice(a, a + n) for a, n in zip(part.start, part.tensor.shape, strict=True))
        assert torch.equal(whole[at], part.tensor)
        assert local.data_ptr() <= part.tensor.data_ptr() < local.data_ptr() + local.nbytes
        seen += part.tensor.flatten().tolist()
    assert sorted(seen) == sorted(local.flatten().tolist())


def test_rows_that_are_not_gate_and_up_of_one_size_are_refused():
    held = Held("experts.gate_up", (2, 3, 4), (0, 0, 0), torch.zeros(2, 3, 4))
    with pytest.raises(ConfigError, match="3 rows are not 2 equal parts"):
        list(split_box(held, GATE_UP))


def test_a_module_of_which_transformers_says_nothing_is_left_alone():
    held = Held("weight", (2, 2), (0, 0), torch.zeros(2, 2))
    assert list(stored_apart(nn.Linear(2, 2))(held)) == [held]


def test_a_tensor_that_is_stored_transformed_is_refused_by_name():
    from transformers.core_model_loading import Transpose, WeightConverter

    model = nn.Linear(2, 2)
    model.config, model.save_pretrained = None, None
    model._weight_conversions = [WeightConverter("stored.weight", "weight", operations=[Transpose(0, 1)])]
    with pytest.raises(ConfigError, match=r"weight is stored transformed \(Transpose\).*rename"):
        list(stored_apart(model)(Held("weight", (2, 2), (0, 0), torch.zeros(2, 2))))
