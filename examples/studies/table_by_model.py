"""A table that a model reads, beside tables that words read, and the data's own fields. Public data (E2E).

``python examples/studies/table_by_model.py --data TRAIN --settings FILE --kept FOLDER --output FOLDER --model GGUF``

Topics are restaurants' names, values are said in many words: families welcome or not, and the price. The data's
generator draws both at random, so documents are chosen by their fields: at most so many of a name's documents may have
another value than the one that the name's place in the list decides. A fact is the value that most of a name's
documents have in their fields.

The model writes one line under a grammar, `LINE`: first the words of the document, then the value, which counts if the
words are the document's. That is the reader
``prompt | llm | parser`` of `release_table`. Here it reads many documents in one request, which share the prompt's
examples: the last digits depend on that, and nothing made here is a release. Readings are kept; noise is drawn often.
It writes ``results.json`` and ``table.md``.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gated_study import command_of
from langchain_core.runnables import Runnable, RunnableLambda
from numpy.typing import NDArray
from rag_owners import sigma_of
from rag_questions import field_of
from rag_study import Quick
from tqdm import tqdm

from langchain_dpicl import PrivateTable
from langchain_dpicl.errors import DPICLError
from langchain_dpicl.lab.evaluation.passes import PassFile, key_of
from langchain_dpicl.local import local_llm
from langchain_dpicl.once.steps import LATTICE
from langchain_dpicl.once.sums import owner_sum
from langchain_dpicl.once.tables_reading import ByName, Domain
from langchain_dpicl.store.datafile import read_records

COLUMNS = {"families": ("yes", "no"), "price": ("cheap", "moderate", "high")}
FIELDS = {
    "families": ("familyFriendly", {"yes": "yes", "no": "no"}),
    "price": (
        "priceRange",
        {
            "cheap": "cheap",
            "less than £20": "cheap",
            "moderate": "moderate",
            "£20-25": "moderate",
            "high": "high",
            "more than £30": "high",
        },
    ),
}
WORDS = {
    "families": {
        "yes": ("family friendly", "kid friendly", "children friendly", "child friendly"),
        "no": ("not family friendly", "not kid friendly", "not children friendly", "not child friendly"),
    },
    "price": {
        "cheap": ("cheap", "less than 20", "low price", "low prices"),
        "moderate": ("moderate", "moderately priced", "20 25", "average price"),
        "high": ("high price", "high priced", "more than 30", "expensive"),
    },
}
"""Phrases for each value, the commonest first."""

PROMPT = """What does each review say of families, and of money? A rating says nothing of money.

Review: The Lantern by the station is a kid friendly pub with a high rating.
Families: "kid friendly", so yes. Price: nothing.

Review: Nonna cooks Greek dishes for less than £20. Its customers rate it low.
Families: nothing. Price: "less than £20", so cheap.

Review: In the north, near Casa Verde, Pepper serves Spanish food and was rated 3 out of 5.
Families: nothing. Price: nothing.

Review: There is a high priced bar that is not family friendly, called Casa Verde.
Families: "not family friendly", so no. Price: "high priced", so high.

Review: Milo is a low rated coffee shop by the sea, near Nonna.
Families: nothing. Price: nothing.

Review: Tulip is Thai and moderately priced. Children are welcome.
Families: "children are welcome", so yes. Price: "moderately priced", so moderate.

Review: Adults only: The Old Forge has a price range of £20-25 and an average rating.
Families: "adults only", so no. Price: "£20-25", so moderate.

Review: Rated 5 out of 5, The Ark is family-friendly and serves Polish food.
Families: "family-friendly", so yes. Price: nothing.

Review: The Crane, a pub with low prices, is by the river.
Families: nothing. Price: "low prices", so cheap.

Review: {text}
Families:"""

LINE = r"""root ::= " " families ". Price: " price "."
families ::= "nothing" | quote ", so " ("yes" | "no")
price ::= "nothing" | quote ", so " ("cheap" | "moderate" | "high")
quote ::= "\"" [^"\n]{3,40} "\""
"""
_TOGETHER = 24
_WITHOUT = "no privacy"
Said = list[tuple[int, int]]


# -- the documents -----------------------------------------------------------------------------------------------------


class Document(NamedTuple):
    """A text, its topic, and the values of its fields by column."""

    text: str
    topic: str
    values: Mapping[str, str]


def document_of(record: Mapping[str, str]) -> Document:
    """A record of E2E."""
    values = {column: known.get(field_of(record, field), "") for column, (field, known) in FIELDS.items()}
    return Document(
        record["output"], field_of(record, "name"), {name: value for name, value in values.items() if value}
    )


def planted(place: int) -> dict[str, str]:
    """The values that most documents of the topic at this place are to have."""
    return {column: values[place % len(values)] for column, values in COLUMNS.items()}


def chosen(
    records: Sequence[Mapping[str, str]], topics: int, owners: int, others: int, first: int | None = None
) -> list[Document]:
    """Documents of the commonest names that are no place of others, ``owners`` each; of the ``first`` names alone.

    Of a name at most ``others`` have another value than `planted`, in each column.
    """
    places = {field_of(record, "near") for record in records}
    documents = [document_of(record) for record in records]
    counts = Counter(document.topic for document in documents if document.topic not in places)
    names = sorted(name for name, _ in counts.most_common(topics))[:first]
    found = []
    for place, name in enumerate(names):
        wanted = planted(place)
        differ = Counter[str]()
        taken = 0
        for document in documents:
            columns = [column for column, value in document.values.items() if value != wanted[column]]
            is_wanted = document.topic == name and document.values
            if is_wanted and taken < owners and all(differ[column] < others for column in columns):
                differ.update(columns)
                taken += 1
                found.append(document)
    return found


# -- readers -----------------------------------------------------------------------------------------------------------


def parsed(text: str, line: str) -> dict[str, str]:
    """The values of a line of the grammar whose quoted words are in the text; nothing of a line that was cut off."""
    found = re.match(r" (.*?)\. Price: (.*)\.", line)
    if not found:
        return {}
    values = {}
    for column, part in zip(COLUMNS, found.groups(), strict=True):
        quote, _, value = part.rpartition(", so ")
        if value in COLUMNS[column] and quote.strip('"').casefold() in text.casefold():
            values[column] = value
    return values


def model(path: str, threads: int | None = None) -> Any:
    """The model, which writes one line of the grammar."""
    return local_llm(path, context=2048, threads=threads, max_tokens=48, extra_body={"grammar": LINE})


def reader(llm: Runnable[Any, Any], topics: Sequence[str]) -> Runnable[str, list[dict[str, str]]]:
    """The chain for `release_table`: the values that the model reads, under the topics that the text names."""
    asked: Runnable[str, Any] = RunnableLambda(lambda text: PROMPT.format(text=text))
    written = asked | llm

    def rows(text: str) -> list[dict[str, str]]:
        values = parsed(text, written.invoke(text))
        return [{"topic": topic, **values} for topic in topics if re.search(rf"\b{re.escape(topic)}\b", text)]

    return RunnableLambda(rows)


def lines(documents: Sequence[Document], llm: Callable[[], Any], kept: PassFile) -> list[str]:
    """The model's line for each document; each is read once, and kept."""
    fresh = [each.text for each in documents if ("line", key_of(each.text)) not in kept]
    parts = [fresh[first : first + _TOGETHER] for first in range(0, len(fresh), _TOGETHER)]
    for part in tqdm(parts, desc="read", unit="request", disable=None, file=sys.stderr):
        found = llm().generate([PROMPT.format(text=text) for text in part], shared_prefix=True)
        for text, (generation,) in zip(part, found.generations, strict=True):
            kept.add(("line", key_of(text)), generation.text)
    return [kept["line", key_of(each.text)] for each in documents]


class Reading(NamedTuple):
    """A reader's pairs for each document. A value of the table is the sum of ``phrases`` cells."""

    domain: Domain
    said: list[Said]
    phrases: int = 1


def by_values(domain: Domain, documents: Sequence[Document], values: Sequence[Mapping[str, str]]) -> Reading:
    """Of values that were read, or stand in the fields."""
    place = {pair: i for i, pair in enumerate(domain.values)}
    said = [
        [(domain.topics.index(document.topic), place[pair]) for pair in read.items()]
        for document, read in zip(documents, values, strict=True)
    ]
    return Reading(domain, said)


def by_words(topics: Sequence[str], documents: Sequence[Document], phrases: int) -> Reading:
    """Of the first ``phrases`` of each value, as `release_table` with ``read="named"`` reads them."""
    columns = {
        column: tuple(phrase for every in values.values() for phrase in every[:phrases])
        for column, values in WORDS.items()
    }
    domain = Domain(tuple(topics), columns)
    said = ByName(domain, None).said([each.text for each in documents], _no_vectors)
    return Reading(domain, [sorted(set(each)) for each in said], phrases)


def _no_vectors(places: NDArray[np.int64]) -> NDArray[np.float32]:
    return np.zeros((len(places), 1), np.float32)


# -- scores ------------------------------------------------------------------------------------------------------------


def facts_of(documents: Sequence[Document]) -> dict[tuple[str, str], str]:
    """By topic and column the value that more documents have in their fields than any other."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for document in documents:
        for column, value in document.values.items():
            counts.setdefault((document.topic, column), Counter())[value] += 1
    found = {}
    for pair, counted in sorted(counts.items()):
        (value, most), *rest = counted.most_common(2)
        if not rest or most > rest[0][1]:
            found[pair] = value
    return found


def total_of(reading: Reading) -> NDArray[np.int64]:
    """The sum over documents, each of an owner of its own, before noise."""
    pairs = [sorted(set(each)) for each in reading.said]
    owners = np.repeat(np.arange(len(pairs)), [len(each) for each in pairs])
    width = reading.domain.shape[1]
    cells = np.array([topic * width + value for each in pairs for topic, value in each], np.int64)
    total = owner_sum(owners, cells, np.ones(len(cells), np.int64), len(reading.domain.topics) * width)
    return total.reshape(reading.domain.shape)


def table_of(reading: Reading, sums: NDArray[np.int64], sigma: float) -> PrivateTable:
    """A table of the values: phrases of one value are added, and their noise with them."""
    counts = (sums / LATTICE).reshape(len(reading.domain.topics), -1, reading.phrases).sum(axis=2)
    receipt: Any = {"id": "simulated"}
    return PrivateTable(counts, reading.domain.topics, COLUMNS, sigma * reading.phrases**0.5, receipt)


def scored(reading: Reading, facts: Mapping[tuple[str, str], str], sigma: float, tables: int) -> dict[str, float]:
    """The shares of facts in %: right first with its error over facts, by column, known, known and wrong."""
    total = total_of(reading)
    found = np.zeros((tables, len(facts), 3))
    for number in range(tables):
        noise = Quick().discrete_gaussian(sigma * LATTICE, total.size).reshape(total.shape) if sigma else 0
        table = table_of(reading, total + noise, max(sigma, 1e-9))
        for place, ((topic, column), right) in enumerate(facts.items()):
            answer = table.top(topic, column)
            is_right = answer.value == right
            found[number, place] = (is_right, answer.is_known, answer.is_known and not is_right)
    means = 100 * found.mean(axis=0)
    scores = {"right": float(means[:, 0].mean()), "error": float(means[:, 0].std(ddof=1) / len(facts) ** 0.5)}
    for column in COLUMNS:
        scores[column] = float(means[[each == column for _, each in facts], 0].mean())
    return scores | {"known": float(means[:, 1].mean()), "known and wrong": float(means[:, 2].mean())}


def agreement(reading: Reading, documents: Sequence[Document]) -> dict[str, dict[str, float]]:
    """By column, of single documents in %: how much of the fields is read, and how much of what is read is there."""
    names = [(column, value) for column, values in COLUMNS.items() for value in values]
    found = {}
    for column in COLUMNS:
        right = read = there = 0
        for document, said in zip(documents, reading.said, strict=True):
            told = {names[place // reading.phrases] for _, place in said}
            told = {pair for pair in told if pair[0] == column}
            wanted = {(column, document.values[column])} if column in document.values else set()
            right += len(told & wanted)
            read += len(told)
            there += len(wanted)
        found[column] = {"recall": 100 * right / max(there, 1), "precision": 100 * right / max(read, 1)}
    return found


def rows_of(
    readings: Mapping[str, Reading], documents: Sequence[Document], settings: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """The scores of each reader without privacy, and at every epsilon."""
    facts = facts_of(documents)
    for name, reading in readings.items():
        about = {"reader": name, "agreement": agreement(reading, documents)}
        yield {**about, "epsilon": _WITHOUT, "sigma": 0.0, **scored(reading, facts, 0.0, 1)}
        for epsilon in settings["epsilons"]:
            sigma = sigma_of(epsilon, settings["delta"])
            yield {**about, "epsilon": epsilon, "sigma": sigma, **scored(reading, facts, sigma, settings["tables"])}


# -- the report --------------------------------------------------------------------------------------------------------


def report(
    rows: Sequence[Mapping[str, Any]], documents: Sequence[Document], settings: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    """Write the files; return what ``results.json`` has."""
    facts = facts_of(documents)
    commonest = [Counter(value for (_, name), value in facts.items() if name == column) for column in COLUMNS]
    always = 100 * sum(each.most_common(1)[0][1] for each in commonest) / len(facts)
    topics = len({document.topic for document in documents})
    measured = (
        f"{len(facts)} facts on {topics} names; {len(documents):,} documents of as many owners, delta "
        f"{settings['delta']:g}; {settings['tables']} tables each. In % of the facts, ± the standard error over facts. "
        f"Always each column's commonest value: {always:.0f}."
    )
    shown = [
        f"| reader | epsilon | right first | {' | '.join(COLUMNS)} | known | known and wrong |",
        "|" + " --- |" * 7,
    ]
    for row in rows:
        is_noisy = row["epsilon"] != _WITHOUT
        known = f"{row['known']:.1f} | {row['known and wrong']:.2f}" if is_noisy else " | "
        columns = " | ".join(f"{row[column]:.1f}" for column in COLUMNS)
        shown.append(
            f"| {row['reader']} | {row['epsilon']} | {row['right']:.1f} ± {row['error']:.1f} | {columns} | {known} |"
        )
    heads = [f"{column}, {share}" for column in COLUMNS for share in ("read", "of it right")]
    single = [f"| reader, single documents | {' | '.join(heads)} |", "|" + " --- |" * (1 + len(heads))]
    for row in rows:
        if row["epsilon"] == _WITHOUT:
            cells = [
                f"{row['agreement'][column][share]:.1f}" for column in COLUMNS for share in ("recall", "precision")
            ]
            single.append(f"| {row['reader']} | {' | '.join(cells)} |")
    table = "\n".join([*shown, "", *single])
    results = {"measured": measured, "table": table, "settings": dict(settings), "methods": list(rows)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (folder / "table.md").write_text(f"{measured}\n\n{table}\n", encoding="utf-8")
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Read what is missing, draw, and report."""
    parser = argparse.ArgumentParser(prog="python examples/studies/table_by_model.py", description=__doc__)
    parser.add_argument("--data", required=True, help="records of E2E: input, output")
    parser.add_argument("--settings", required=True, type=Path, help="a JSON file")
    parser.add_argument("--kept", required=True, type=Path, help="a folder for readings, NOT to be published")
    parser.add_argument("--output", required=True, type=Path, help="a folder for the report")
    parser.add_argument("--model", required=True, help="an embedded model or a GGUF file")
    parser.add_argument("--title", default="model", help="the model's name in the report")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(argv)
    given = sys.argv[1:] if argv is None else argv
    try:
        settings = json.loads(options.settings.read_text("utf-8"))
        documents = chosen(
            read_records(options.data), *(settings[name] for name in ("topics", "owners", "others", "first"))
        )
        topics = sorted({document.topic for document in documents})
        domain = Domain(tuple(topics), COLUMNS)
        options.kept.mkdir(parents=True, exist_ok=True)
        kept = PassFile(options.kept / "lines.jsonl", {"model": options.title, "prompt": key_of(PROMPT + LINE)})
        try:
            written = lines(documents, lambda: model(options.model, options.threads), kept)
        finally:
            kept.close()
        readings = {
            "the data's fields": by_values(domain, documents, [document.values for document in documents]),
            options.title: by_values(
                domain, documents, [parsed(each.text, line) for each, line in zip(documents, written, strict=True)]
            ),
            "words, 1 phrase a value": by_words(topics, documents, 1),
            "words, 4 phrases a value": by_words(topics, documents, 4),
        }
        settings["command"] = shlex.join(command_of("table_by_model.py", given))
        results = report(list(rows_of(readings, documents, settings)), documents, settings, options.output)
    except DPICLError as error:
        print(f"table_by_model: {error}", file=sys.stderr)
        return 1
    print(results["table"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
