"""The CPU shims of the test environment: they close two gaps of the CPU build, and touch nothing else."""

from __future__ import annotations

import json
import subprocess

from tests.support.sglang_options import PYTHON


def in_sglangs_python(code):
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_torchvision_can_be_imported_and_says_that_it_has_no_kernel():
    code = """
import json, torch, torchvision
boxes = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
try:
    torch.ops.torchvision.nms(boxes, torch.ones(1), 0.5)
    said = "nothing"
except NotImplementedError as error:
    said = str(error)
print(json.dumps([torchvision.__version__, said]))
"""
    version, said = in_sglangs_python(code)
    assert version.startswith("0.28.0")
    assert "torchvision::nms" in said


def test_a_python_that_imports_neither_pays_nothing():
    assert in_sglangs_python("import json, sys; print(json.dumps(sorted({'torch', 'sglang'} & set(sys.modules))))") == []


def test_sglang_takes_the_platform_whose_operators_are_plain_torch():
    code = """
import json
from sglang.srt.platforms import current_platform
found = [type(current_platform).__name__, current_platform.get_dispatch_key_name(), current_platform.device_type]
print(json.dumps(found))
"""
    assert in_sglangs_python(code) == ["CpuWithoutKernels", "native", "cpu"]


def test_the_packs_own_code_needs_no_shim():
    code = """
import json, pathlib, mx_common, mx_sglang
files = [f for m in (mx_common, mx_sglang) for f in pathlib.Path(m.__file__).parent.rglob("*.py")]
print(json.dumps([len(files), [f.name for f in files if "shims" in f.read_text()]]))
"""
    count, named = in_sglangs_python(code)
    assert count > 50
    assert named == []
