"""Makes the checked-in protocol code from the `.proto` files.

    python scripts/generate_wire.py            # write
    python scripts/generate_wire.py --check    # exit 1 and name the files that are stale

Needs the development extra (`grpcio-tools`). What is written is data and types only: `_generated/descriptors.py` holds the
serialized descriptors, from which `mx_common.wire` builds its classes at import, and `p2p.pyi` and its like tell type
checkers about them. Invariant: no generated *code*, so no protobuf runtime refuses it for the version of the compiler.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

WIRE = Path(__file__).resolve().parent.parent / "mx_common" / "wire"
# a file comes after those that it imports
PROTOS = ("p2p", "refit", "refit_ext", "activity")
COMMAND = "python scripts/generate_wire.py"
BYTES_PER_LINE = 32
# protoc's stubs are neither formatted nor complete by the rules of the code beside them
STUB_HEADER = """\
# Types of {name}.proto. Made by `{command}`; do not edit.
# ruff: noqa
# fmt: off
# mypy: disable-error-code="type-arg"
"""


def compile_protos(folder: Path) -> tuple[bytes, dict[str, str]]:
    """The serialized FileDescriptorSet and the type stubs, by proto name, written by protoc into `folder`."""
    from grpc_tools import protoc

    descriptors = folder / "set.bin"
    status = protoc.main(
        [
            "protoc",
            f"--proto_path={WIRE}",
            f"--proto_path={files('grpc_tools') / '_proto'}",
            f"--descriptor_set_out={descriptors}",
            f"--pyi_out={folder}",
            *(f"{name}.proto" for name in PROTOS),
        ]
    )
    if status != 0:
        raise SystemExit(f"protoc failed with status {status}: fix the message above in {WIRE}/*.proto")
    return descriptors.read_bytes(), {name: _imports_ours((folder / f"{name}_pb2.pyi").read_text()) for name in PROTOS}


def _imports_ours(stub: str) -> str:
    """`stub` with the modules of this package where protoc names the ones that it would have generated."""
    for name in PROTOS:
        stub = stub.replace(f"import {name}_pb2 as", f"from mx_common.wire import {name} as")
    return stub


def render() -> dict[Path, str]:
    """The text of every generated file, by path below `WIRE`."""
    with tempfile.TemporaryDirectory() as scratch:
        serialized, stubs = compile_protos(Path(scratch))
    chunks = [serialized[at : at + BYTES_PER_LINE] for at in range(0, len(serialized), BYTES_PER_LINE)]
    lines = "\n".join(f'    "{chunk.hex()}"' for chunk in chunks)
    rendered = {
        Path("_generated/descriptors.py"): (
            f'"""Serialized FileDescriptorSet of the .proto files. Made by `{COMMAND}`; do not edit."""\n\n'
            f"FILE_DESCRIPTOR_SET = bytes.fromhex(\n{lines}\n)\n"
        )
    }
    for name, stub in stubs.items():
        rendered[Path(f"{name}.pyi")] = STUB_HEADER.format(name=name, command=COMMAND) + stub
    return rendered


def stale(rendered: dict[Path, str], root: Path = WIRE) -> list[Path]:
    """The generated files below `root` that are missing or differ from what the compiler makes now."""
    return [path for path, text in rendered.items() if not (root / path).is_file() or (root / path).read_text() != text]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Generate the protocol code from the .proto files.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a checked-in file is stale")
    arguments = parser.parse_args(argv)
    rendered = render()
    outdated = stale(rendered)
    if arguments.check:
        for path in outdated:
            print(f"stale: mx_common/wire/{path}; run: {COMMAND}", file=sys.stderr)
        return 1 if outdated else 0
    for path in outdated:
        (WIRE / path).parent.mkdir(exist_ok=True)
        (WIRE / path).write_text(rendered[path])
        print(f"wrote mx_common/wire/{path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
