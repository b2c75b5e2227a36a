"""Private evolution: texts that any model writes, of which the owners choose the ones that resemble their records.

**A round** is one private sum over public candidates. Each record of an owner votes for the candidate that is nearest
to it by the store's vectors. The votes of an owner are a vector over the candidates, clipped to norm 1 by owner. They
are added exactly, and every candidate gets discrete Gaussian noise, also one without a vote (`once.sums`). The best are
kept, a model varies them, and the kept ones and their variants are the candidates of the next round.

**No private text leaves.** The model that writes sees candidates alone, which are public: the first ones, and functions
of released sums. Neighbours are data sets that differ in one owner; each round has sensitivity 1 at a rate of 1, and
the rounds compose as the plan's line counts them, since candidates depend on earlier releases alone.

Source: Lin et al. 2024 ("Differentially Private Synthetic Data via Foundation Model APIs 1"), Xie et al. 2024 (2, for
text), whose votes are clipped by record; here by owner.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.runnables import Runnable
from langchain_core.runnables.base import coerce_to_runnable
from numpy.typing import NDArray

from langchain_dpicl.budget import Charge, PrivacyBudget, Receipt
from langchain_dpicl.calls.flow import Flow
from langchain_dpicl.durable import replacing, writing
from langchain_dpicl.errors import InvalidParameter, ModelUnavailable, UnsafeConfigurationError
from langchain_dpicl.once.files import RECEIPT, read_public, write_public
from langchain_dpicl.once.steps import LATTICE
from langchain_dpicl.once.sums import SumRelease, opened, owner_sum, part_of
from langchain_dpicl.once.tables_reading import whole_vectors
from langchain_dpicl.privacy import checks
from langchain_dpicl.private.reach import fields_of
from langchain_dpicl.release.threshold import public_texts
from langchain_dpicl.release.transaction import Charged
from langchain_dpicl.store import ExemplarStore
from langchain_dpicl.store.base import Numbers
from langchain_dpicl.store.records import Vectors, attempt, embed

_FORMAT = "dpicl-evolved-1"
_LOOPBACK = ("127.0.0.1", "localhost", "::1", "0.0.0.0")
_HERE = ("langchain_dpicl", "langchain_core")
"""The packages whose embedding models compute in the process."""
_COMPUTES = ("torch", "llama_cpp", "onnxruntime")
"""The packages of objects that do."""


class EvolvedTexts(Sequence[str]):
    """Public texts that owners' records are near to, by noisy votes, those with most first. `evolve_texts` makes it.

    Attributes
    ----------
    votes
        Each text's noisy votes in the last round. An owner adds 1 in all if its records vote for one text, and a vector
        of norm 1 if they vote for several.
    sigma
        The noise's standard deviation of every vote.
    receipts
        What each round cost.
    """

    def __init__(
        self, texts: Sequence[str], votes: NDArray[np.float64], sigma: float, receipts: Sequence[Receipt]
    ) -> None:
        self._texts = tuple(texts)
        self.votes = votes
        self.sigma = sigma
        self.receipts = list(receipts)

    def __getitem__(self, place: Any) -> Any:
        return self._texts[place]

    def __len__(self) -> int:
        return len(self._texts)

    def __repr__(self) -> str:
        return f"EvolvedTexts({len(self)} texts, {len(self.receipts)} rounds, sigma={self.sigma:.4g})"

    def documents(self) -> list[Document]:
        """A document for each text, with its "votes" and the last round's "receipt"."""
        receipt = dict(self.receipts[-1])
        pairs = zip(self._texts, self.votes.tolist(), strict=True)
        return [Document(text, metadata={"votes": votes, "receipt": receipt}) for text, votes in pairs]

    def save(self, path: str | Path) -> None:
        """Write one JSON file, which replaces an older one as a whole. It is public."""
        content = {
            "texts": self._texts,
            "votes": self.votes.tolist(),
            "sigma": self.sigma,
            "receipts": self.receipts,
        }
        write_public(path, _FORMAT, content)

    @classmethod
    def load(cls, path: str | Path) -> EvolvedTexts:
        """Read a file of `save`. Raises `InvalidParameter` for another file."""
        return read_public(path, _FORMAT, "a file of evolved texts", cls._of)

    @classmethod
    def _of(cls, content: dict[str, Any]) -> EvolvedTexts:
        votes = np.array(content["votes"], np.float64)
        texts = [str(text) for text in content["texts"]]
        if votes.shape != (len(texts),):
            raise ValueError
        receipts = [RECEIPT.validate_python(each) for each in content["receipts"]]
        return cls(texts, votes, float(content["sigma"]), receipts)


class NearestVotes(SumRelease):
    """The one sum of a round: each owner's votes for the candidates that are nearest to its records."""

    mechanism = "sum"
    names = ("dpicl-votes-part-1", "round", "round")
    needs_owners = False

    def __init__(
        self, store: ExemplarStore, budget: PrivacyBudget, texts: Sequence[str], near: Vectors, line_name: str | None
    ) -> None:
        super().__init__(store, budget, (1, len(texts)), {"candidates": list(texts)}, None, line_name)
        self._near = whole_vectors(near)

    def work(self, charged: Charged) -> Flow[NDArray[np.int64]]:
        """The sum, if the ledger does not have it, of the records of one moment."""
        sums = yield partial(self._begun, charged)
        if sums:
            found: NDArray[np.int64] = sums[0]
            return found
        found = yield partial(self._summed, charged)
        return found

    def _summed(self, charged: Charged) -> NDArray[np.int64]:
        assert isinstance(charged.entry, Charge)
        total = self._total(charged.participants)
        return self._unpacked(self._noisy(charged.request.line, charged.entry, 0, total))

    def _total(self, paid: Numbers | None) -> NDArray[np.int64]:
        """The sum of the owners' vectors. Private."""
        size = self._shape[1]
        keys = [np.zeros(0, np.int64)]
        with self.store.reading() as view:
            for some, whose in self._pages(view, paid):
                nearest = (whole_vectors(view.vectors(some)) @ self._near.T).argmax(axis=1)
                keys.append(whose * size + nearest)
        cells, votes = np.unique(np.concatenate(keys), return_counts=True)
        return owner_sum(cells // size, cells % size, votes, size).reshape(self._shape)


def evolve_texts(
    store: ExemplarStore,
    first: Sequence[str],
    vary: Runnable[Any, Any],
    budget: PrivacyBudget,
    *,
    rounds: int = 3,
    keep: int = 10,
    candidates: int = 100,
    local: bool = False,
    output: str | Path | None = None,
    line: str | None = None,
) -> EvolvedTexts:
    """Evolve public texts towards the private records: owners vote for the nearest, a model varies the best.

    Parameters
    ----------
    store
        Its vectors say what is near. Its embedding model has seen every private text, so it must show that it computes
        on this machine: by an address of it, by a network that it holds (of torch, llama.cpp or ONNX), or as one of
        this package's or of langchain-core's. Any other is refused, unless ``local`` vouches for it.
    first
        The candidates of the first round: public texts, such as a model's answers to "write a question that customers
        may ask". They must not come from the records.
    vary
        A chain that takes a text and gives another like it, such as ``prompt | llm | StrOutputParser()``. Any model
        may do it, a hosted one too: it sees no private text.
    budget
        Has a line for the mechanism "sum" of at least ``rounds`` releases. It counts all callers together (scope
        ``"shared"``).
    rounds
        The number of votes. One that is 1 only ranks ``first``.
    keep
        The number of texts that a round keeps, those with most noisy votes.
    candidates
        The number of texts of a later round: the kept ones, and variants of each in turn.
    local
        You say that the store's embedding model computes on machines of yours, though it does not show it.
    output
        A folder, which is made if it is not there. Each round's votes and variants are written to it, and an
        interrupted call goes on when it is called again with the same settings: each round is charged once. This needs
        a budget that replays and has no tickets.
    line
        The budget's line, if it has several.

    Raises, before the first charge, `InvalidParameter`, `UnsafeConfigurationError` for an embedding model elsewhere,
    `PrivacyBudgetExceeded` if fewer than ``rounds`` are left, and `ModelUnavailable` if ``vary`` gives no text. After a
    charge `ReleaseFailed`, and `ModelUnavailable` or `StoreError` for a model that fails between two rounds.
    """
    if not isinstance(store, ExemplarStore):
        raise InvalidParameter("store", type(store).__name__, "an ExemplarStore")
    texts = list(dict.fromkeys(public_texts("first", first)))
    rounds = checks.whole("rounds", rounds)
    keep = checks.whole("keep", keep)
    candidates = checks.whole("candidates", candidates, at_least=keep)
    if not isinstance(local, bool):
        raise InvalidParameter("local", local, "True or False")
    if not local and not computes_here(store.embeddings):
        raise UnsafeConfigurationError(
            f"the store's {type(store.embeddings).__name__} does not show that it computes on this machine, and it has "
            "seen every private text: give the store a local embedding model, or say local=True if this is one"
        )
    writer = coerce_to_runnable(vary)
    if rounds > 1 and not _variants(writer, texts[:1]):
        raise ModelUnavailable("the chain that varies texts gives an empty one; this call has charged nothing")
    folder = None if output is None else Path(output)
    if folder is not None:
        with writing("output", folder):
            folder.mkdir(parents=True, exist_ok=True)
    budget = opened(budget, lambda _: None, store, "texts")
    receipts: list[Receipt] = []
    for number in range(1, rounds + 1):
        release = NearestVotes(store, budget, texts, embed(store.embeddings, texts), line)
        name = hashlib.sha256(f"{release.digest} {store.lineage} {keep} {candidates}".encode()).hexdigest()[:16]
        ends = f"{number}-{name}.json"
        evolved = _voted(release, texts, None if folder is None else folder / f"votes-{ends}", rounds - number + 1)
        receipts += evolved.receipts
        if number < rounds:
            path = None if folder is None else folder / f"variants-{ends}"
            texts = _varied(writer, evolved[:keep], candidates, path)
    return EvolvedTexts(evolved[:keep], evolved.votes[:keep], evolved.sigma, receipts)


def _voted(release: NearestVotes, texts: Sequence[str], path: Path | None, needed: int) -> EvolvedTexts:
    """One round's texts, those with most votes first: from its file if it is there.

    A new round is refused unless the budget has all that are ``needed``.
    """
    begun = path is not None and part_of(path).exists()
    if path is not None and path.exists() and not begun:
        return EvolvedTexts.load(path)
    if not begun:
        release.line.check(needed)

    def ranked(sums: NDArray[np.int64], receipt: Receipt) -> EvolvedTexts:
        votes = sums[0] / LATTICE
        order = np.argsort(-votes, kind="stable")
        return EvolvedTexts([texts[place] for place in order], votes[order], release.line.parameter, [receipt])

    return release.made(path, ranked)


def _varied(writer: Runnable[Any, Any], kept: Sequence[str], candidates: int, path: Path | None) -> list[str]:
    """The next round's candidates, from the file if it is there: a model may not write them alike again."""
    if path is not None and path.exists():
        known, fault = attempt(lambda: json.loads(path.read_bytes()))
        if fault:
            raise InvalidParameter("output", str(path), "a folder whose files are whole")
        return public_texts("output", known)
    asked = [kept[i % len(kept)] for i in range(candidates - len(kept))]
    text = json.dumps(list(dict.fromkeys([*kept, *_variants(writer, asked)])))
    if path is not None:
        with writing("output", path), replacing(path, mode=0o644) as file:
            file.write(text.encode())
    return public_texts("vary", json.loads(text))  # as a later call reads them


def _variants(writer: Runnable[Any, Any], texts: Sequence[str]) -> list[str]:
    """A variant of each text; empty ones are left out. Raises `ModelUnavailable`."""
    answers, fault = attempt(writer.batch, list(texts))
    if not fault and not all(isinstance(each, str) for each in answers):
        fault = "it gives no texts"
    if fault:
        raise ModelUnavailable(
            f"the chain that varies texts fails ({fault}). This costs nothing: with output= the same call goes on"
        )
    return [each.strip() for each in answers if each.strip()]


def computes_here(embeddings: Embeddings) -> bool:
    """Return whether a model shows that it computes on this machine: see `evolve_texts`.

    The addresses are those in its fields and its clients'. Of a model that holds others all of them must show it.
    """
    held = fields_of(embeddings)
    inner = [each for each in held if isinstance(each, Embeddings)]
    addresses = [*held, *(getattr(each, "_client", None) for each in held)]
    addresses += [getattr(each, "base_url", None) for each in addresses]
    hosts = [_host(str(each)) for each in addresses if str(each).lower().startswith(("http://", "https://"))]
    if inner or hosts:
        return all(map(computes_here, inner)) and all(host in _LOOPBACK for host in hosts)
    networks = {kind.__module__.partition(".")[0] for each in held for kind in type(each).__mro__}
    return type(embeddings).__module__.partition(".")[0] in _HERE or not networks.isdisjoint(_COMPUTES)


def _host(address: str) -> str:
    """The host of a web address, or the address if it has none."""
    try:
        return urlsplit(address).hostname or address
    except ValueError:
        return address
