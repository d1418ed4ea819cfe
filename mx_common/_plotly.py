"""The plotting library, which only the extra `report` installs.

    plotly = need_plotly("a report")
    plotly.graph_objects.Figure()

Invariant: imported where something is drawn, nowhere else.
"""

from __future__ import annotations

from typing import Any

from mx_common.errors import ConfigError

__all__ = ["need_plotly"]


def need_plotly(what: str) -> Any:
    """The package, with `graph_objects`, `subplots` and `offline`. Raises ConfigError, saying that `what` needs it, when it is missing."""
    try:
        import plotly.graph_objects
        import plotly.offline
        import plotly.subplots
    except ImportError as error:
        raise ConfigError(
            f"{what} is drawn with plotly, which is not installed ({error}); pip install 'mx-adapters[report]'"
        ) from error
    return plotly
