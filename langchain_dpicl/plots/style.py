"""The style that every figure shares. matplotlib loads when a figure is made, not before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from langchain_dpicl.errors import InvalidParameter

COLORS = ("#1f4e79", "#b8692a", "#3b7d4f", "#7a4b8c", "#8a8a2e", "#2a8a94", "#a23b53", "#5b6b7a")
SHADES = ("#9ecae1", "#6baed6", "#2171b5", "#08306b")
"""One hue from light to dark, for curves in an order."""
LIMIT = "#b03a2e"
"""A plan and its end; a bound above its claim."""
GREY = "#7f7f7f"


def new_figure(path: str | Path, width: float, height: float) -> Any:
    """Return an empty figure of this size in inches. Raises `InvalidParameter` without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        bound = "drawing needs matplotlib: pip install 'langchain-dpicl[eval]'"
        raise InvalidParameter("plot", str(path), bound) from None
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: str | Path) -> None:
    """Give all axes a light grid and plain numbers, and write the file.

    Logarithmic axes are labelled 0.5, 1, 2, 5, 10 instead of by powers of ten; over three decades and more, by powers
    alone. Ticks at given values stay. Raises `InvalidParameter` if the file cannot be written.
    """
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            if axis.get_scale() == "log" and not isinstance(axis.get_major_locator(), FixedLocator):
                low, high = axis.get_view_interval()
                axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 1e3 else (1.0,), numticks=20))
                axis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
                axis.set_minor_locator(NullLocator())
        axes.grid(True, color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as failure:
        raise InvalidParameter("plot", str(path), f"a picture file that can be written ({failure})") from None


def whole_numbers(axis: Any) -> None:
    """Put ticks at whole numbers, with thousands separated."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(6, integer=True))
    axis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def plain(value: float) -> str:
    """Return a number to three digits, or whole with thousands separated."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
