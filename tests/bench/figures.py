"""How benchmarks print their figures."""

from __future__ import annotations

import json
from collections.abc import Mapping


def show(figures: Mapping[str, float], as_json: bool) -> None:
    """Print figures by name, as one JSON object or a line each."""
    if as_json:
        print(json.dumps(figures, indent=2))
        return
    width = max(len(name) for name in figures)
    for name, value in figures.items():
        print(f"{name:<{width}}  {value:.4g}")
