"""Logits for private decoding, against plain transformers: same weights, same prompts, same run, the two taking turns.

An answer of 25 tokens asks, for every token, for the zero-shot row and for 4 rows with one fresh demonstration each (a
large store: no demonstration comes twice in an answer). Prompts look like the E2E data set's: a list of fields, then
a sentence about a restaurant.

- ours: :class:`~langchain_dpicl.decoding.TransformersLogits`, which keeps what it has read. Warm: every demonstration
  was part of an earlier answer. Cold: none was.
- plain: at every step the 5 prompts as one padded batch, read anew: ``model(**batch).logits[:, -1]``. At least 5 times
  slower than ours, warm, is the target.
- plain, last position only: the same with ``logits_to_keep=1``, which spares it the output layer elsewhere (no target).

Plain decoding is timed at every fourth step, as its steps take long and grow evenly.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from typing import Any

import numpy as np

from langchain_dpicl.decoding.backends.loading import load
from langchain_dpicl.decoding.backends.transformers_model import TransformersLogits
from langchain_dpicl.decoding.model import Demonstration

STEPS, SHOTS, EVERY = 25, 4, 4
TARGET = "plain over ours, warm (at least 5)"

NAMES = ["Blue Spice", "The Wrestlers", "Green Man", "Loch Fyne", "The Golden Curry", "Browns Cambridge", "Zizzi"]
FOODS = ["French", "Italian", "Chinese", "English", "Indian", "Japanese", "fast food"]
AREAS = ["riverside", "city centre"]
PRICES = ["cheap", "moderate", "high", "less than £20", "more than £30"]
RATINGS = ["1 out of 5", "3 out of 5", "5 out of 5", "low", "average"]
PLACES = ["Crowne Plaza Hotel", "Burger King", "Café Sicilia", "The Bakers", "Raja Indian Cuisine"]


def prompts(count: int) -> tuple[list[Demonstration], str]:
    """So many different demonstrations, and a query."""
    kinds = list(itertools.product(NAMES, FOODS, AREAS, PRICES, RATINGS, PLACES))
    chosen = [kinds[i * 97 % len(kinds)] for i in range(count + 1)]

    def fields(name: str, food: str, area: str, price: str, rating: str, place: str) -> str:
        return (
            f"name[{name}], eatType[restaurant], food[{food}], priceRange[{price}], customer rating[{rating}], "
            f"area[{area}], near[{place}]\nDescription:"
        )

    shown = [
        f"{fields(*kind)} {kind[0]} is a {kind[1]} restaurant near {kind[5]} in the {kind[2]} area. Its prices are "
        f"{kind[3]} and its customers rate it {kind[4]}.\n\n"
        for kind in chosen[:count]
    ]
    return [Demonstration(i, text) for i, text in enumerate(shown)], fields(*chosen[count])


class Plain:
    """Decoding as one writes it without a cache."""

    def __init__(self, model: str, network: Any, shown: list[Demonstration], asked: str, released: list[int]) -> None:
        self.model, _ = load(model, "float32")
        self.network, self.released = network, released
        self.asked = network.tokens(asked)
        self.shown = [network.tokens(demonstration.text) for demonstration in shown]

    def step(self, step: int, **settings: Any) -> Any:
        """The scores of one step, on the left-padded batch of its prompts."""
        import torch

        rest = [*self.asked, *self.released[:step]]
        rows = [[], *self.shown[SHOTS * step : SHOTS * (step + 1)]]
        ids = [[*self.network.first, *row, *rest] for row in rows]
        width = max(map(len, ids))
        batch = {
            "input_ids": torch.tensor([[0] * (width - len(row)) + row for row in ids]),
            "attention_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids]),
        }
        batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
        with torch.inference_mode():
            return self.model(**batch, **settings, use_cache=False).logits[:, -1].numpy()


def answer(logits: TransformersLogits, shown: list[Demonstration], asked: str, released: list[int]) -> list[Any]:
    """Every step's scores, ours."""
    session = logits.session(asked, shown, steps=STEPS)
    found = [session.logits(range(SHOTS * step, SHOTS * (step + 1)), released[:step]) for step in range(len(released))]
    session.close()
    return found


def seconds(action: Any) -> tuple[float, Any]:
    started = time.perf_counter()
    result = action()
    return time.perf_counter() - started, result


def measure(model: str, rounds: int) -> dict[str, float]:
    """Every figure, by name: medians of the rounds."""
    import torch

    shown, asked = prompts(SHOTS * STEPS)
    logits = TransformersLogits(model)
    network = logits._loaded
    sentence = " Blue Spice is a cheap French restaurant in the riverside area, near Burger King." * 3
    released = network.tokens(sentence)[:STEPS]
    plain = Plain(model, network, shown, asked, released)
    timed = list(range(0, STEPS, EVERY))
    times: dict[str, list[float]] = {"cold": [], "warm": [], "plain": [], "last": []}
    for _ in range(rounds):
        logits.forget(range(len(shown)))
        for kind in ("cold", "warm"):
            took, found = seconds(lambda: answer(logits, shown, asked, released))
            times[kind].append(took / STEPS)
        for kind, settings in (("last", {"logits_to_keep": 1}), ("plain", {})):
            each = [seconds(lambda step=step, more=settings: plain.step(step, **more)) for step in timed]
            times[kind].append(statistics.mean(took for took, _ in each))
            for step, (_, expected) in zip(timed, each, strict=True):
                assert np.abs(expected - found[step]).max() < 1e-2, "the two sides do not compute the same"
    cold, warm, whole, last = (statistics.median(times[kind]) for kind in ("cold", "warm", "plain", "last"))
    lengths = [len(network.first) + len(network.tokens(demonstration.text)) for demonstration in shown]
    return {
        "threads": torch.get_num_threads(),
        "tokens of a demonstration, mean": statistics.mean(lengths),
        "tokens of the query": len(network.tokens(asked)),
        "megabytes kept for a demonstration, mean": logits.states.bytes / max(1, len(logits.states)) / 1e6,
        "ours, warm: tokens a second": 1 / warm,
        "ours, cold: tokens a second": 1 / cold,
        "plain: tokens a second": 1 / whole,
        "plain, last position only: tokens a second": 1 / last,
        TARGET: whole / warm,
        "plain over ours, cold": whole / cold,
        "plain, last position only, over ours, warm": last / warm,
        "plain, last position only, over ours, cold": last / cold,
    }


def main(argv: list[str] | None = None) -> int:
    """Print the figures; exit with 1 if the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--model", default="gemma3-270m", help="an embedded model, a GGUF file or a folder")
    parser.add_argument("--rounds", type=int, default=3, help="answers of each kind (default 3)")
    args = parser.parse_args(argv)
    figures = measure(args.model, args.rounds)
    if args.json:
        print(json.dumps(figures, indent=2))
    else:
        width = max(len(name) for name in figures)
        for name, value in figures.items():
            print(f"{name:<{width}}  {value:.4g}")
    return 0 if figures[TARGET] >= 5.0 else 1


if __name__ == "__main__":
    sys.exit(main())
