"""Names of source policies as commands take them.

    selector: str = typer.Option(None, callback=policy_option)

Invariant: a command that is asked for a policy nobody knows is used wrongly; only inside a load does `random` take its place.
"""

from __future__ import annotations

import typer

from mx_common.selection import known_policies

__all__ = ["policy_option"]


def policy_option(value: str | None) -> str | None:
    """The policy's name as it is known; None stays None."""
    if value is None:
        return None
    name, known = value.strip().lower(), known_policies()
    if name not in known:
        raise typer.BadParameter(f"no policy is named {value!a}; known: {', '.join(known)}")
    return name
