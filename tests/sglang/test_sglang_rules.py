"""What the adapter refuses and how it reads SGLang's words, asked of the adapter beside the real SGLang, without an engine."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.support.sglang_options import PYTHON

ASKED = """
import json
import torch
from torch import nn
from sglang.srt.configs.load_config import LoadFormat
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from mx_common.errors import ConfigError
from mx_sglang.hooks import keep_name
from mx_sglang.process import is_mx
from mx_sglang.refit import SglangRefit

def refused(**attributes):
    layer = nn.Linear(2, 2)
    for name, value in attributes.items():
        setattr(layer, name, value)
    try:
        SglangRefit(nn.Sequential(layer), torch.device("cpu"))
    except ConfigError as error:
        return str(error)

class Plain(UnquantizedLinearMethod):
    pass

renamed = []
for load_format in ("mx", "MX", "auto"):
    keep_name(lambda manager, path, given: renamed.append(given), None, "org/model", load_format)
print(json.dumps({
    "is_mx": [is_mx(one) for one in ("mx", "MX", "auto", None, LoadFormat.AUTO)],
    "renamed": renamed,
    "split": refused(_hc_attn_tf32_parts=torch.ones(1)),
    "packed": refused(quant_method=UnquantizedLinearMethod(), use_intel_amx_backend=True),
    "unknown": refused(quant_method=Plain()),
}))
"""


@pytest.fixture(scope="module")
def answers():
    done = subprocess.run([PYTHON, "-W", "ignore", "-c", ASKED], capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_load_format_counts_in_any_case(answers):
    assert answers["is_mx"] == [True, True, False, False, False]


def test_a_version_of_a_trainer_keeps_the_served_name_and_another_model_does_not(answers):
    assert answers["renamed"] == ["auto"]


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        ("split", "Online weight updates are not supported"),
        ("packed", "repacks after loading (UnquantizedLinearMethod)"),
        ("unknown", "repacks after loading (Plain)"),
    ],
)
def test_a_model_that_serves_other_bytes_than_it_loads_is_refused_before_the_first_write(answers, layer, says):
    assert says in answers[layer]
