"""Redact notes, then release answers from them: how much each hides. The notes are invented, and no model is needed.

A redaction takes out what says who somebody is: names, numbers, addresses. It misses some, and leaves what only one
person has: a trade in a village. A release hides that, but not from whoever runs the program or the model.
"""

import random
import re
from collections import Counter

import numpy as np
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import InMemoryVectorStore

from langchain_dpicl import (
    DPAggregate,
    ExemplarStore,
    LabelVote,
    PoissonExampleSelector,
    PrivacyBudget,
    PrivateEnsemble,
)

PEOPLE = 600
TREATED = {
    "wheezes at night": "inhaler",
    "has a swollen toe": "tablets",
    "sees flashing lights": "dark room",
    "has a scaly elbow": "ointment",
}
TRADES = """baker beekeeper bookbinder brewer butcher carpenter clockmaker cooper dyer farrier fisher florist glazier
joiner mason miller potter roofer saddler tailor tanner thatcher weaver welder""".split()
VILLAGES = """Alder Birch Cedar Dell Elm Fern Gorse Heath Ivy Juniper Kelp Larch Moss Nettle Oak Pine Quarry Reed Sedge
Thistle Umber Vale Willow Yarrow""".split()
FIRST, LAST = "Ana Ben Cora Dan Eva Finn Gita Hugo Ida Jon".split(), "Abbot Bell Cole Dunn Eads Frost Gray Holt".split()
chance = random.Random(5)  # it makes the invented notes

# What this redaction knows: two words with capitals after a title, numbers of a telephone, an address of e-mail.
PATTERNS = {
    "NAME": re.compile(r"\b(?:Mr|Ms) [A-Z][a-z]+ [A-Z][a-z]+"),
    "PHONE": re.compile(r"\b\d{3}[- ]\d{4}\b"),
    "EMAIL": re.compile(r"\b[\w.]+@[\w.]+\w"),
}


def redacted(text: str) -> str:
    """Return a text with a word in the place of each name, number and address that the patterns know."""
    for kind, pattern in PATTERNS.items():
        text = pattern.sub(f"<{kind}>", text)
    return text


def note() -> dict[str, str]:
    """Return a person's note, with what it holds of the person. One note in ten is written in haste."""
    first, last = chance.choice(FIRST), chance.choice(LAST)
    name, phone = f"Ms {first} {last}", f"{chance.randrange(200, 999)}-{chance.randrange(1000, 9999)}"
    if chance.random() < 0.1:
        name, phone = f"{first.lower()} {last.lower()}", phone.replace("-", "/")
    email = f"{first}.{last}@post.example".lower()
    trade, village, symptom = chance.choice(TRADES), chance.choice(VILLAGES), chance.choice(list(TREATED))
    text = f"{name}, {phone}, {email}: the {trade} of {village} {symptom}."
    held = {"name": name, "phone": phone, "email": email}
    return {"text": text, "label": TREATED[symptom], "who": f"{trade} of {village}", **held}


class Words(Embeddings):
    """Public embeddings without a model: a direction for each word that a symptom, a trade or a village has."""

    known = tuple(sorted({*" ".join(TREATED).split(), *TRADES, *VILLAGES} - {"a", "at", "has", "sees"}))

    def embed_query(self, text: str) -> list[float]:
        """Return the direction of a text's words."""
        found = set(re.findall(r"\w+", text))
        vector = np.array([float(word in found) for word in self.known])
        return [float(each) for each in vector / max(1.0, float(np.linalg.norm(vector)))]

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Return theirs, each by itself."""
        return [self.embed_query(text) for text in texts]


notes = [note() for _ in range(PEOPLE)]
safer = [{**each, "text": redacted(each["text"])} for each in notes]
held = [(each[kind], each["text"]) for each in safer for kind in ("name", "phone", "email")]
missed = [what for what, text in held if what in text]
print(f"names, numbers and addresses: {len(held)} before redaction, {len(missed)} after it, such as {missed[0]!r}")

counts = Counter(each["who"] for each in notes)
alone = [each for each in notes if counts[each["who"]] == 1]
print(f"people whom a trade and a village single out: {len(alone)} of {PEOPLE}, before redaction and after it")

# A neighbour knows the trade and village of a hundred of them, and asks for each one's treatment: first a search.
known = alone[:100]
search = InMemoryVectorStore.from_texts([each["text"] for each in safer], Words(), metadatas=safer)
found = [search.similarity_search(f"the {each['who']}", k=1)[0].metadata["label"] for each in known]
right = sum(label == each["label"] for label, each in zip(found, known, strict=True))
print(f"their treatments found by a search of the redacted notes: {right} of {len(known)}")

# Then a release over the same redacted notes, with a budget for all of these questions.
store = ExemplarStore.from_records(safer, Words(), input_key="text", output_key="label")
selector = PoissonExampleSelector(store, calls=40, threshold=0.6, eligible=0.25)
budget = PrivacyBudget(epsilon=3, delta=1e-5, releases=150, ledger="sqlite:///treatments.db", name="treatments")
treatment = PrivateEnsemble(selector) | DPAggregate(LabelVote(list(TREATED.values())), budget)
asked = treatment.batch([{"input": f"the {each['who']}"} for each in known])
right = sum(label == each["label"] for label, each in zip(asked, known, strict=True))
usual = max(Counter(each["label"] for each in known).values())
print(f"the same from the release: {right} of {len(known)} (to name the commonest of four for all: {usual})")

right = sum(treatment.invoke({"input": symptom}) == label for symptom, label in TREATED.items())
print(f"questions about a symptom, which many have: {right} of {len(TREATED)} right")
