"""Folders for the small files by which processes of one user on one host tell each other things.

    folder = private_folder("serving", make=True)

Invariant: what lies in such a folder was written by this user (or root): in a shared temporary directory, another user's folder of the
same name is refused and never read.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from mx_common import envs
from mx_common.errors import ConfigError

__all__ = ["private_folder"]


def private_folder(name: str, *, make: bool = False) -> Path:
    """The folder `name`, made when `make`, once it is sure that no other user can write there.

    Raises ConfigError when one could, FileNotFoundError (an OSError) when it is not there.
    """
    base = envs.runtime_dir()
    path = base / name
    if make:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    _check_owner(base, root_too=True)
    mode = _check_owner(path, root_too=False)
    if mode & 0o077:
        path.chmod(0o700)
    return path


def _check_owner(path: Path, *, root_too: bool) -> int:
    """Permission bits of a real directory of this user (or of root). Raises ConfigError, FileNotFoundError."""
    found = path.lstat() if not root_too else path.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{path} is not a directory; remove it or set MX_RUNTIME_DIR to a directory of yours")
    if found.st_uid != os.geteuid() and not (root_too and found.st_uid == 0):
        raise ConfigError(
            f"{path} belongs to user {found.st_uid}, this process runs as {os.geteuid()}; "
            "set MX_RUNTIME_DIR to a directory of yours"
        )
    return stat.S_IMODE(found.st_mode)
