"""wrap_rag: the user's own retrieval chain, as the member over buckets of private documents; and how it is asked."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import (
    Runnable,
    RunnableAssign,
    RunnableConfig,
    RunnableLambda,
    RunnableParallel,
    RunnablePassthrough,
    RunnablePick,
    RunnableSequence,
    RunnableWithFallbacks,
)
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.runnables.configurable import DynamicRunnable
from langchain_core.vectorstores import VectorStore, VectorStoreRetriever

from langchain_dpicl.aggregators import Aggregator
from langchain_dpicl.budget import Budget
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.privacy import checks
from langchain_dpicl.private.copies import Timeout
from langchain_dpicl.private.reach import is_named
from langchain_dpicl.release.base import AnyRelease
from langchain_dpicl.release.ensemble import PrivateEnsemble
from langchain_dpicl.release.sealed import DPAggregate, SealedRelease
from langchain_dpicl.retrieval.retrievers import bucket_documents, limit_of, on_buckets
from langchain_dpicl.selection import PoissonExampleSelector
from langchain_dpicl.store import ExemplarStore
from langchain_dpicl.store.base import PrivateStore
from langchain_dpicl.store.records import Vectors

DOCUMENTS = 4
"""Documents that a member gets, unless told otherwise: as many as a LangChain retriever gives."""

CHOICE, RATE = 8, 0.1
"""The most owners in a bucket for each document of a member, and the rate from which noise grows as fast as it."""

RELEVANT = 0.35
"""The gate's threshold unless told otherwise: with all-MiniLM-L6-v2, about where texts begin to share their subject."""

Form = Literal["text", "mapping"]

_WRAPPERS = ((RunnableBindingBase, "bound"), (RunnableWithFallbacks, "runnable"), (DynamicRunnable, "default"))
_OF_MAPPINGS = ("langgraph.pregel.main.Pregel", "langchain_classic.chains.base.Chain")


def wrap_rag(
    chain: Any,
    source: PrivateStore | VectorStore | VectorStoreRetriever,
    aggregator: Aggregator[Any],
    budget: Budget,
    *,
    members: int = 10,
    rate: float | None = None,
    shots: int | None = None,
    documents: int | None = None,
    threshold: float | Callable[[Vectors], float] | None = RELEVANT,
    eligible: int | None = None,
    asks: Form | None = None,
    question_key: str = "question",
    documents_key: str | None = None,
    owner_key: str | None = None,
    line: str | None = None,
    noise: float | None = None,
    return_receipt: bool = False,
    max_concurrency: int | None = None,
    timeout: Timeout = "auto",
    allow_state: Sequence[object] = (),
) -> PrivateRAG:
    """A retrieval chain made private: N copies of it answer, each from documents of its own owners, in one release.

    Parameters
    ----------
    chain
        The chain as it stands, retriever included; it stays as it is. In the member, a copy, EVERY retriever is
        replaced by one that gives the member's own documents as LangChain documents, nearest first, whatever it is
        asked. Of retrievers within a retriever (an ensemble, a compressor, many queries) the outermost is replaced.
        The aggregator must be able to read its answer, as a rule a text: ``chain.pick("answer")`` for a mapping.
    source
        The private documents: an `ExemplarStore` (or one in PostgreSQL), or a collection that
        `ExemplarStore.from_vectorstore` takes over, or its ``as_retriever()``, without search settings beside ``k``.
    aggregator, budget, line, noise, return_receipt
        As for `DPAggregate`.
    members
        N, the number of copies.
    rate, shots
        As for `PoissonExampleSelector`. Default: as many owners as fill every member's ``documents``, of those whom a
        question finds ``eligible``. Without ``eligible``: a rate of 1/10, beyond which the noise grows as fast as it,
        but between 1 and 8 owners in a bucket for each of the ``documents``, so that a member finds near ones. The
        budget's plan keeps the rate from its first release on, however the collection changes. A higher rate finds
        nearer documents for more noise. At rate=1 every document lies in a bucket and nothing is amplified: for the
        largest collections, or many members.
    documents
        The most documents that a member gets. Default: the ``k`` of the retrievers that it replaces, else 4.
    threshold
        The relevance gate of `PoissonExampleSelector`: only owners with a document at least so similar to the question
        take part in an answer. With a budget of ``tickets=True`` an owner pays only for these questions. The default
        suits all-MiniLM-L6-v2; `suggest_threshold` finds another embedding model's. None for no gate.
    eligible
        As for `PoissonExampleSelector`: how many owners a typical question finds eligible, a public estimate.
    asks
        What the chain takes: a "text" or a "mapping". Default: what its first steps show (a retriever takes a text; a
        prompt, an assignment, an ``itemgetter``, a graph a mapping). Needed for others, such as a function.
    question_key
        The key of the question, a text, in mappings that the chain takes and in requests. Documents are near to it.
    documents_key
        For a chain without a retriever: the key under which its input gets the list of LangChain documents.
    owner_key
        The metadata entry that names the owner, if ``source`` is a collection. Without it each document is its own.
    max_concurrency, timeout, allow_state
        As for `PrivateEnsemble`.

    The release takes a text, or a mapping with the text under ``question_key``: the same request, which reaches the
    chain in the form that it takes, from `DPRetriever` and `as_tool` too. A chain that takes a mapping gets the
    caller's further keys, and a request without those that its first steps need is refused and costs nothing. The
    caller's config does not reach it: ``configurable`` fields keep the values that the chain was wrapped with. A batch
    of n charges n together.

    The ledger's replay knows a chain by these settings alone. Give two different chains two lines, two budgets or
    ``replay=False``: on one line the second would answer an equal question with the first one's release.

    Promise. All documents of an owner lie in one bucket, drawn by the owner's own coins, and a member searches its own
    bucket alone. So without an owner one member's input differs, and the aggregator's promise for one member's output
    holds here. An owner's own documents, the question and the public threshold decide whether the owner takes part.

    Raises
    ------
    UnsafeConfigurationError
        The chain reaches documents that could not be replaced, in a function, a tool or an object: a retriever, a
        vector store, a document, a LangChain or LangGraph store, a function that names the class of a retriever or of
        a vector store. (Not seen: collections of other kinds, such as a database's client or a list of texts, and what
        a function computes.) Or a memory or a chat history, through which members would read what others wrote. Or a
        retriever of the chain or the source has search settings that the release would not carry out
        (``search_kwargs`` other than ``k``, a ``search_type``, a filter, bound arguments): a filter may be what keeps
        one reader from another's documents.
    InvalidParameter
        A chain without a retriever and without ``documents_key``; ``asks`` is needed or is not what the chain takes; a
        chain that is a release already.
    """
    if isinstance(chain, AnyRelease):
        raise InvalidParameter("chain", type(chain).__name__, "a chain that is not private yet: this is a release")
    if isinstance(source, PrivateStore):
        if owner_key is not None:
            raise InvalidParameter("owner_key", owner_key, "None if the source is a store, which knows its owners")
        store = source
    else:
        collection: object = source
        if isinstance(source, VectorStoreRetriever):
            limit_of(source, "the source")  # how many documents a question finds is the chain's to say
            collection = source.vectorstore
        if not isinstance(collection, VectorStore):
            raise InvalidParameter("source", type(source).__name__, "an ExemplarStore, a vector store or its retriever")
        store = ExemplarStore.from_vectorstore(collection, owner_key=owner_key)
    replaced, limits = on_buckets(chain, documents_key)
    if documents is None and len(limits) > 1:
        raise InvalidParameter("documents", None, f"given if retrievers have different k: {sorted(limits)}")
    documents = checks.whole("documents", next(iter(limits), DOCUMENTS) if documents is None else documents)
    members = checks.whole("members", members, at_least=2)
    by_owners = rate is None and eligible is None  # all of them are eligible, at most: the rate is as without a gate
    if rate is None and shots is None and not by_owners:
        shots = documents
    selector = PoissonExampleSelector(
        store,
        members,
        rate=1.0 if by_owners else rate,
        shots=None if by_owners else shots,
        max_exemplars=documents,
        exemplars_per_owner=documents,  # one owner's documents may be the nearest: they lie in one bucket anyway
        threshold=threshold,
        eligible=eligible,
        nearest_to=question_key,
    )
    if by_owners:
        owners = store.owner_count
        wanted = max(documents, min(CHOICE * documents, int(RATE * owners / members)))
        selector.choose_rate(max(1, min(wanted, owners // members)) if shots is None else shots)
    if asks not in (None, "text", "mapping"):
        raise InvalidParameter("asks", asks, '"text" or "mapping"')
    known = form_of(replaced) if documents_key is None else "mapping"
    if asks is not None and known not in (None, asks):
        raise InvalidParameter("asks", asks, f'"{known}", which this chain takes, or None')
    form = known or asks
    if form is None:
        raise InvalidParameter("asks", asks, '"text" or "mapping", since the chain\'s first step does not show it')

    def as_asked(values: Mapping[str, Any]) -> Any:
        if form == "text":
            return values[question_key]
        asked = {key: value for key, value in values.items() if key != "examples"}
        return asked if documents_key is None else {**asked, documents_key: bucket_documents()}

    settings = {"max_concurrency": max_concurrency, "timeout": timeout, "allow_state": allow_state}
    member, needed = RunnableLambda(as_asked) | replaced, keys_of(replaced)[0]
    ensemble = AskedEnsemble(selector, member, form, question_key, documents_key, needed, **settings)
    return PrivateRAG(ensemble, DPAggregate(aggregator, budget, line=line, noise=noise, return_receipt=return_receipt))


class PrivateRAG(SealedRelease):
    """The release that `wrap_rag` makes: it takes a text, or a mapping with it.

    ``asks`` is what the wrapped chain takes, "text" or "mapping".
    """

    def __init__(self, ensemble: AskedEnsemble, aggregate: DPAggregate[Any]) -> None:
        super().__init__(ensemble, aggregate)
        self.name = "PrivateRAG"
        self.asks = ensemble.asks

    @property
    def InputType(self) -> Any:
        """A question, or a mapping with it."""
        return str | dict[str, Any]

    def invoke(self, input: str | dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """One release."""
        return super().invoke(input, config, **kwargs)  # type: ignore[arg-type]

    async def ainvoke(self, input: str | dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """One release. A cancelled call keeps its charge."""
        return await super().ainvoke(input, config, **kwargs)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return f"PrivateRAG({self.ensemble!r}, {self.aggregator!r})"


class AskedEnsemble(PrivateEnsemble):
    """An ensemble that may be asked a bare text, and whose chain is asked in one form, however the release was."""

    def __init__(
        self,
        selector: PoissonExampleSelector,
        member: Runnable[Any, Any],
        asks: Form,
        question_key: str,
        documents_key: str | None,
        needed: frozenset[str],
        **settings: Any,
    ) -> None:
        super().__init__(selector, member, **settings)
        self.asks, self._question_key, self._documents_key = asks, question_key, documents_key
        self._needed = needed - {documents_key} if asks == "mapping" else frozenset()

    @property
    def variant(self) -> str:
        """The settings beside the chain that decide a member's prompt."""
        return (
            f" asks={self.asks} documents={self.selector.max_exemplars} question_key={self._question_key!r}"
            f" documents_key={self._documents_key!r}"
        )

    def check_request(self, values: object) -> Mapping[str, Any]:
        """A text, or a mapping with it under the question's key; with the chain's keys if it takes a mapping."""
        if isinstance(values, str):
            values = {self._question_key: str(values)}
        if isinstance(values, Mapping):
            if self._documents_key in values:
                raise InvalidParameter("input", [self._documents_key], "a mapping without this key, which is filled")
            if self.asks == "text" and set(values) != {self._question_key}:
                bound = f"a text, or a mapping with {self._question_key!r} alone: the chain takes a text"
                raise InvalidParameter("input", sorted(map(str, values)), bound)
        return super().check_request(values)


def form_of(part: Any) -> Form | None:
    """Whether a chain takes a text or a mapping, as far as its first steps show it."""
    for kind, inner in _WRAPPERS:
        if isinstance(part, kind):
            return form_of(getattr(part, inner))
    if isinstance(part, RunnableSequence):
        return form_of(next((step for step in part.steps if not isinstance(step, RunnablePassthrough)), None))
    if isinstance(part, RunnableParallel):
        return next((form for form in map(form_of, part.steps__.values()) if form is not None), None)
    if isinstance(part, BaseRetriever):
        return "text"
    takes_mapping = isinstance(part, (RunnableAssign, RunnablePick)) or is_named(part, _OF_MAPPINGS)
    # A prompt with one variable takes a bare text just as well.
    return "mapping" if takes_mapping or _reads_keys(part) or len(keys_of(part)[0]) > 1 else None


def keys_of(part: Any, given: frozenset[str] = frozenset()) -> tuple[frozenset[str], frozenset[str] | None]:
    """The keys that a chain needs beside the given ones, as far as known, and those given after it; None if unknown."""
    if isinstance(part, RunnableSequence):
        needed: frozenset[str] = frozenset()
        after: frozenset[str] | None = given
        for step in part.steps:
            if after is not None:
                more, after = keys_of(step, after)
                needed |= more
        return needed, after
    if isinstance(part, RunnableBindingBase):
        return keys_of(part.bound, given)
    if isinstance(part, RunnableAssign):
        return keys_of(part.mapper, given)[0], given | part.mapper.steps__.keys()
    if isinstance(part, RunnableParallel):
        return frozenset().union(*(keys_of(step, given)[0] for step in part.steps__.values())), None
    if isinstance(part, RunnablePassthrough):
        return frozenset(), given
    if _reads_keys(part):
        names = part.func.__reduce__()[1]
    else:  # a prompt's, or a chain's of langchain-classic
        names = getattr(part, "input_variables", None) or getattr(part, "input_keys", None) or ()
    return frozenset(name for name in names if isinstance(name, str)) - given, None


def _reads_keys(part: Any) -> bool:
    return isinstance(part, RunnableLambda) and isinstance(getattr(part, "func", None), operator.itemgetter)
