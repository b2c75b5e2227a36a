"""Logits for private decoding, against plain transformers: same weights, same prompts, same run, the two taking turns.

An answer of 25 tokens asks, for every token, for the zero-shot row and for 4 rows with one fresh demonstration each (a
large store: no demonstration comes twice in an answer). Prompts look like the E2E data set's: a list of fields, then
a sentence about a restaurant.

- ours: :class:`~langchain_dpicl.decoding.TransformersLogits`, which keeps what it has read. Warm: every demonstration
  was part of an earlier answer. Cold: none was.
- plain: at every step the 5 prompts as one padded batch, read anew: ``model(**batch).logits[:, -1]``. At least 5 times
  slower than ours, warm, is the target.
- plain, last position only: the same with ``logits_to_keep=1``, which spares it the output layer elsewhere. At least 4
  times slower than ours, warm, is the target.

Plain decoding is timed at every fourth step, as its steps take long and grow evenly.

And whole private answers by `DPSampler`, of 8 tokens over 100,000 owners with random vectors and a sentence each.
About 2 of them have part in a token, padded to 6 rows of the model on both sides, which reads all documents anew:

- with a gate that lets 5,000 owners through, over one without a gate: at most 1.3 is the target.
- the same with a gate whose owners pay with tickets.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from typing import Any

import numpy as np
from figures import show
from langchain_core.embeddings import DeterministicFakeEmbedding

from langchain_dpicl import DemonstrationTemplate, DPSampler, ExemplarStore, PoissonExampleSelector, PrivacyBudget
from langchain_dpicl.decoding.backends.loading import load
from langchain_dpicl.decoding.backends.transformers_model import StateCache, TransformersLogits
from langchain_dpicl.decoding.model import Demonstration

STEPS, SHOTS, EVERY = 25, 4, 4
TARGET = "plain over ours, warm (at least 5)"
LAST = "plain, last position only, over ours, warm (at least 4)"
OWNERS, NEAR, CALLS, SLOTS, TOKENS, DIMENSION = 100_000, 5_000, 2, 6, 8, 384
GATED, PAID = "a token with a gate over one without (at most 1.3)", "a token with a gate and tickets over one without"

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
        LAST: last / warm,
        "plain, last position only, over ours, cold": last / cold,
    }


def gated(model: str, rounds: int, owners: int = OWNERS) -> dict[str, float]:
    """Answers with a gate, with tickets too, and without, in turns: seconds a token, and the median of the ratios."""
    texts = [each.text.partition("Description: ")[2].strip() for each in prompts(1000)[0]]
    records = [{"text": texts[i % len(texts)], "owner": f"p{i}"} for i in range(owners)]
    vectors = np.random.default_rng(0).standard_normal((owners, DIMENSION), dtype=np.float32)
    store = ExemplarStore.from_records(
        records, DeterministicFakeEmbedding(size=DIMENSION), input_key="text", output_key=None, owner_key="owner",
        vectors=vectors, progress=False,
    )  # fmt: skip
    questions = [f"Which restaurant, asks {i}?" for i in range(rounds + 1)]
    with store.reading() as view:
        first = np.sort(view.similarity(np.arange(owners), store.embed_query(questions[0])))
    gate: dict[str, Any] = {"threshold": float(first[-NEAR * owners // OWNERS]), "eligible": NEAR, "nearest_to": "text"}
    template = DemonstrationTemplate("Document: {text}\n\n", "Question: {text}\nAnswer:")
    logits = TransformersLogits(model)
    times: dict[str, list[float]] = {"without": [], "gate": [], "tickets": []}
    with tempfile.TemporaryDirectory() as folder:
        samplers = {}
        for kind in times:
            selector = PoissonExampleSelector(store, calls=CALLS, **(gate if kind != "without" else {}))
            url, count = f"sqlite:///{folder}/{kind}.db", TOKENS * (rounds + 1)
            budget = PrivacyBudget(8.0, 1e-6, count, url, kind, tickets=kind == "tickets", replay=False)
            lengths: dict[str, Any] = {"max_tokens": TOKENS, "min_tokens": TOKENS, "stop": (), "top_k": 50}
            samplers[kind] = DPSampler(logits, selector, budget, template=template, slots=SLOTS, **lengths)
        for question in questions:  # the first round loads, solves the plans and gives the owners their seats
            for kind, sampler in samplers.items():
                logits.states = StateCache(logits.states.memory_bytes)
                took, _ = seconds(lambda sampler=sampler, question=question: sampler.invoke(question))
                times[kind].append(took / TOKENS)
            assert len({sampler.budget.spent() for sampler in samplers.values()}) == 1, "answers of other lengths"
        for sampler in samplers.values():
            sampler.budget.close()
    without = np.array(times["without"][1:])
    return {
        **{f"{kind}: milliseconds a token": 1e3 * statistics.median(each[1:]) for kind, each in times.items()},
        GATED: float(np.median(np.array(times["gate"][1:]) / without)),
        PAID: float(np.median(np.array(times["tickets"][1:]) / without)),
    }


def main(argv: list[str] | None = None) -> int:
    """Print the figures; exit with 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--model", default="gemma3-270m", help="an embedded model, a GGUF file or a folder")
    parser.add_argument("--gate", action="store_true", help="measure whole private answers alone")
    parser.add_argument("--rounds", type=int, default=3, help="answers of each kind (default 3)")
    args = parser.parse_args(argv)
    figures = ({} if args.gate else measure(args.model, args.rounds)) | gated(args.model, args.rounds)
    show(figures, args.json)
    good = figures.get(TARGET, 5.0) >= 5.0 and figures.get(LAST, 4.0) >= 4.0 and figures[GATED] <= 1.3
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
