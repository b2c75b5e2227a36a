"""Data files as newcomers have them: messages whose words tell their labels, tidy or with many kinds of mess."""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Iterator

LABELS = ["billing", "technical", "sales"]
WORDS = [
    "invoice charge refund price",
    "crash error login screen",
    "password name address email",
    "offer quote buy demo",
]


def messages(
    labels: list[str], owner_key: str, seed: int = 7, customers: int = 150, each: int = 1
) -> list[dict[str, str]]:
    """Messages of customers, whose words tell their labels."""
    rng = random.Random(seed)
    made = []
    for number in range(each * customers):
        label = rng.randrange(len(labels))
        words = " ".join(rng.choices(WORDS[label].split(), k=3))
        text = f"Hello, {words}, ticket {seed}{number:03d}, thanks"
        made.append({"text": text, "label": labels[label], owner_key: f"c{number % customers:03d}"})
    return made


def written(records: list[dict[str, str]], name: str) -> str:
    """Return records as a file of this name has them."""
    if name.endswith(".jsonl"):
        return "".join(json.dumps(record) + "\n" for record in records)
    file = io.StringIO()
    table = csv.DictWriter(file, records[0], lineterminator="\n")
    table.writeheader()
    table.writerows(records)
    return file.getvalue()


def rows() -> list[tuple[str, ...]]:
    """Messages, labels and customers."""
    return [tuple(record.values()) for record in messages(LABELS, "customer", each=2)]


def table(header: str, data: list[tuple[str, ...]], between: str = ",", end: str = "\n") -> str:
    return end.join(
        [header, *(between.join(f'"{cell}"' if between in cell else cell for cell in row) for row in data), ""]
    )


def messes() -> Iterator[tuple[str, bytes, str]]:
    """A file's name, its bytes, and a word of which `dpicl check-data` must speak ("": nothing special)."""
    good = rows()
    head = "text,label,customer"
    plain = table(head, good)
    yield "clean", plain.encode(), ""
    yield "semicolons", table("text;label;customer", good, ";").encode(), ""
    yield "tabs", table("text\tlabel\tcustomer", good, "\t").encode(), ""
    yield "bom", b"\xef\xbb\xbf" + plain.encode(), ""
    yield "crlf", table(head, good, end="\r\n").encode(), ""
    yield "latin1", plain.replace("Hello", "Grüße").encode("latin-1"), ""
    yield "capital", table("Text,label,customer", good).encode(), "Text"
    yield (
        "emptylabels",
        table(head, [(t, "" if i < 5 else s, c) for i, (t, s, c) in enumerate(rows())]).encode(),
        "label",
    )
    yield "unknownlabel", table(head, [*good, ("Where is it?", "biling", "c001")]).encode(), "line 302"
    yield (
        "owners",
        table(head, [(t, s, c.upper() + " " if i % 40 == 0 else c) for i, (t, s, c) in enumerate(rows())]).encode(),
        "owner",
    )
    yield "ragged", (plain + "only one cell\n").encode(), "line"
    yield "headeronly", f"{head}\n".encode(), ""
    yield "empty", b"", ""
    yield "few", table(head, good[:12]).encode(), "owner"
    yield (
        "heavy",
        table(head, [(t, s, "c000" if i < 150 else c) for i, (t, s, c) in enumerate(rows())]).encode(),
        "owner",
    )
