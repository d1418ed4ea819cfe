"""Makes the folders that the compatibility tests put on PYTHONPATH: the real `modelexpress`, and protobuf 6.

    python scripts/compat_env.py           # prints the two folders

They lie beside the packages of this interpreter's environment and never inside it, because `modelexpress` asks for an older
protobuf than the engines have. Each is made once: a folder whose list of packages is as below is left alone.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MODELEXPRESS", "PROTOBUF_6", "Overlay"]


@dataclass(frozen=True)
class Overlay:
    """A folder of packages, installed without what they depend on."""

    name: str
    packages: tuple[str, ...]

    @property
    def path(self) -> Path:
        """Where it is or will be."""
        return Path(sys.prefix) / "compat" / self.name

    def ensure(self) -> Path:
        """Make it unless it is there; returns the folder. Raises `CalledProcessError` when the registry cannot be reached."""
        stamp = self.path / ".complete"
        wanted = "\n".join(self.packages)
        if stamp.is_file() and stamp.read_text() == wanted:
            return self.path
        scratch = self.path.with_suffix(".partial")
        for folder in (scratch, self.path):
            shutil.rmtree(folder, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(scratch), *self.packages]
        subprocess.run(command, check=True, timeout=300)
        (scratch / ".complete").write_text(wanted)
        scratch.rename(self.path)
        return self.path


MODELEXPRESS = Overlay("modelexpress", ("modelexpress==0.7.0",))
# later releases of the two gRPC packages were generated for protobuf 7
PROTOBUF_6 = Overlay("protobuf6", ("protobuf==6.33.5", "grpcio-health-checking==1.78.0", "grpcio-reflection==1.78.0"))


if __name__ == "__main__":
    for overlay in (MODELEXPRESS, PROTOBUF_6):
        print(overlay.ensure())
