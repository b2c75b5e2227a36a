"""wrap_rag: the user's own retrieval chain, as the member over buckets of private documents; and how it is asked."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from langchain_core.runnables import Runnable, RunnableLambda
from langchain_core.runnables.base import coerce_to_runnable
from langchain_core.vectorstores import VectorStore, VectorStoreRetriever

from langchain_dpicl.aggregators import Aggregator, CandidateVote, Structured
from langchain_dpicl.aggregators.base import T
from langchain_dpicl.budget import PrivacyBudget
from langchain_dpicl.errors import (
    InvalidParameter,
    PrivacyWarning,
    UnsafeConfigurationError,
)
from langchain_dpicl.privacy import checks
from langchain_dpicl.privacy.choice import CALLS, ELIGIBLE
from langchain_dpicl.private.boundary import check_public
from langchain_dpicl.private.models import Timeout
from langchain_dpicl.release.advice import poor_plan
from langchain_dpicl.release.base import AnyRelease
from langchain_dpicl.release.ensemble import PrivateEnsemble
from langchain_dpicl.release.sealed import DPAggregate, SealedRelease
from langchain_dpicl.retrieval.forms import (
    MESSAGES,
    Form,
    answer_in,
    answered_state,
    form_of,
    keys_of,
    messages_of,
    read_messages,
)
from langchain_dpicl.retrieval.rewriting import rewriting_of
from langchain_dpicl.retrieval.searches import (
    filter_in,
    filter_of,
    narrowed,
    searches_in,
    stand_ins,
)
from langchain_dpicl.selection import PoissonExampleSelector
from langchain_dpicl.selection.rules import OfPrincipal, OfRequest
from langchain_dpicl.store import ExemplarStore
from langchain_dpicl.store.records import Vectors
from langchain_dpicl.store.standin import DOCUMENTS, documents_of

RELEVANT = 0.35
"""The gate's threshold unless told otherwise: with all-MiniLM-L6-v2, about where texts begin to share their subject."""


def wrap_rag(
    chain: Any,
    source: ExemplarStore | VectorStore | VectorStoreRetriever,
    aggregator: Aggregator[Any] | Sequence[str] | Runnable[Any, Any],
    budget: PrivacyBudget,
    *,
    calls: float | None = None,
    pad_to: int | None = None,
    max_calls: int | None = None,
    members: int | None = None,
    rate: float | None = None,
    shots: int | None = None,
    documents: int | None = None,
    threshold: float | Callable[[Vectors], float] | None = RELEVANT,
    eligible: float | None = None,
    filter: OfRequest = None,
    visible_to: OfPrincipal = None,
    search_query: Any = None,
    asks: Form | None = None,
    question_key: str | None = None,
    documents_key: str | None = None,
    owner_key: str | None = None,
    line: str | None = None,
    return_receipt: bool = False,
    max_concurrency: int | None = None,
    timeout: Timeout = "auto",
    public: Sequence[object] = (),
    share: Sequence[object] = (),
    isolate: Sequence[str] = (),
    allow_state: Sequence[object] = (),
) -> PrivateRAG[Any]:
    """A retrieval chain made private: copies of it answer, each from documents of its own owners, in one release.

    Parameters
    ----------
    chain
        The chain as it stands, of any shape (LCEL, an agent with a retriever's tool or middleware, a graph); it stays
        as it is. In the member, a copy, ``store.as_vectorstore()`` takes the place of the source's collection, so each
        search reads the member's own documents, with its own ``k``, search type, filter and threshold, and retrievers
        around it (a compressor, an ensemble, many queries) keep their meaning. The aggregator must be able to read its
        answer, as a rule a text: ``chain.pick("answer")`` for a mapping. An agent, or another graph whose state has
        ``messages``, answers with its structured response, or else its last message.
    source
        The private documents: an `ExemplarStore` (or one in PostgreSQL), or a collection that
        `ExemplarStore.from_vectorstore` takes over, or its ``as_retriever()``, without search settings beside ``k`` and
        a filter. A store stands for the one vector store that the chain searches.
    aggregator, budget, line, return_receipt
        As for `DPAggregate`. For texts: public candidates, a list or a chain that writes them without documents, among
        which a `CandidateVote` with the store's embedding model chooses.
    calls, pad_to, max_calls
        As for `PoissonExampleSelector`: each sampled owner has a copy of its own, and so many have one on average.
        Default: 20 calls, padded to 35.
    members
        N, the number of copies whose documents owners share, instead of calls: for answers that take the documents of
        several owners.
    rate, shots
        As for `PoissonExampleSelector`; ``shots`` with ``members`` alone. Default: ``calls`` divided by the number of
        ``eligible`` owners; with ``members`` the plan chooses. The budget's plan keeps the rate from its first release
        on, however the collection changes. A higher rate takes more owners, for more noise. At rate=1 nothing is
        amplified: for the largest collections.
    documents
        The most documents in a member's bucket. Default: the largest ``k`` of the chain's searches (``fetch_k`` of
        MMR, 20 unless given), else 4. Say it if a function asks for more, or several queries should find more. A search
        finds its own ``k`` of them, however many there are: for more in a prompt, raise the retriever's ``k``.
    threshold
        The relevance gate of `PoissonExampleSelector`: only owners with a document at least so similar to the question
        take part in an answer. With a budget of ``tickets=True`` an owner pays only for these questions. The default
        suits all-MiniLM-L6-v2; `suggest_threshold` finds another embedding model's. None for no gate.
    eligible
        As for `PoissonExampleSelector`: how many owners a typical question finds eligible, a public estimate. Needed
        with a filter or ``visible_to``: the number of owners whom one caller's filter lets through. Default without: a
        fifth of the owners when the plan is made (at least twice the calls, at most all): a guess, and safe for privacy
        if it is wrong. A better one buys more: where twice as many are eligible there are twice the calls, for no less
        noise; where only half of them are, half.
    filter, visible_to
        As for `PoissonExampleSelector`: which documents count for a request, and for its caller. A filter of the
        ``source``'s search settings counts beside it, and so do those of the chain's searches, if each has one.
    search_query
        As for `PoissonExampleSelector`: what makes the text that documents are near to, such as one question of a
        chat's history. Default: the chain's own rewriting if a model makes the text for its retriever, as in
        `create_history_aware_retriever`; needed if the chain rewrites where that cannot be found.
    asks
        What the chain takes: a "text", a "mapping", or "messages", a mapping with these. Default: what its first steps
        show (a retriever takes a text; a graph with ``messages`` in its state messages; a prompt, an assignment, an
        ``itemgetter``, another graph a mapping). Needed for others, such as a function.
    question_key
        The key of the question, a text, in mappings that the chain takes and in requests. Documents are near to it.
        Default: "question". Of messages it is the last one of a person.
    documents_key
        For a chain without a retriever: the key under which its input gets the list of LangChain documents.
    owner_key
        The metadata entry that names the owner, if ``source`` is a collection. Without it each document is its own.
    max_concurrency, timeout, public, share, isolate
        As for `PrivateEnsemble`.

    The release takes a text, or a mapping with the text under ``question_key``: the same request, which reaches the
    chain in the form that it takes, from `DPRetriever` and `as_tool` too. Of an agent it takes ``{"messages": [...]}``
    as well. A chain that takes a mapping gets the caller's further keys, and a request without those that its first
    steps need is refused and costs nothing; a text stands for one key alone. The
    caller's config does not reach it: ``configurable`` fields keep the values that the chain was wrapped with. A batch
    of n charges n together.

    A chat's history is part of the request, and stays outside: ``RunnableWithMessageHistory(release, ...)`` keeps the
    questions and the released answers.

    The ledger's replay knows a chain by these settings alone, and of ``search_query`` only that there is one. Give two
    different chains two lines, two budgets or ``replay=False``: on one line the second would answer an equal question
    with the first one's release.

    Promise. All documents of an owner lie in one call's bucket, drawn by the owner's own coins, and a copy searches its
    own bucket alone. So without an owner one call is missing (with ``members``: one member's input differs), and the
    aggregator's promise for one output holds here. An owner's own documents, the question and the public threshold
    decide whether the owner takes part.

    Warns (`PrivacyWarning`) if the plan of a vote is a poor one for the public numbers: see ``dpicl advise``.

    Raises
    ------
    UnsafeConfigurationError
        The chain reaches documents elsewhere: a second vector store, a retriever without one, a ranking or a memory
        beside it (BM25, TF-IDF, time-weighted), a document, a LangChain or LangGraph store, the class of any of these;
        or the collection where a copy cannot replace it, such as a global that a class's method names, or a method
        that the stand-in lacks. (Not seen: collections of other kinds, such as a database's client or a list of texts,
        and what a function computes.) Or a memory or a chat history, through which members would read what others
        wrote. Or the source's retriever has search settings beside ``k`` and a filter.
    InvalidParameter
        A search setting of the chain that the stand-in would not carry out: a filter may be what keeps one reader from
        another's documents. A chain without a search and without ``documents_key``; ``asks`` is needed or is not what
        the chain takes; a chain that is a release already.
    """
    if isinstance(chain, AnyRelease):
        raise InvalidParameter(
            "chain",
            type(chain).__name__,
            "a chain that is not private yet: this is a release",
        )
    listed = isinstance(aggregator, (list, tuple, Runnable))
    if not listed and not isinstance(aggregator, Aggregator):
        raise InvalidParameter(
            "aggregator",
            type(aggregator).__name__,
            "an Aggregator such as NoisyVote(labels), or for texts public candidates: a list of them, or a chain",
        )
    public = check_public(public)
    fixed = None
    collection: Any = None
    if isinstance(source, ExemplarStore):
        if owner_key is not None:
            raise InvalidParameter(
                "owner_key",
                owner_key,
                "None if the source is a store, which knows its owners",
            )
        store = source
    else:
        collection = source
        if isinstance(source, VectorStoreRetriever):
            fixed = filter_of(source.search_kwargs)
            read = {"k", "filter"} if fixed else {"k"}
            lost = set(source.search_kwargs) - read
            if source.search_type != "similarity":
                lost.add("search_type")
            if lost:
                raise UnsafeConfigurationError(
                    f"the source's {type(source).__name__} searches with {', '.join(sorted(lost))}, which is the "
                    "chain's to say: give wrap_rag the collection, and filter= for the documents that count"
                )
            collection = source.vectorstore
        if not isinstance(collection, VectorStore):
            raise InvalidParameter(
                "source",
                type(source).__name__,
                "an ExemplarStore, a vector store or its retriever",
            )
        store = ExemplarStore.from_vectorstore(collection, owner_key=owner_key)
    chosen: Any = CandidateVote(store.embeddings, aggregator) if listed else aggregator  # type: ignore[arg-type]
    chain = coerce_to_runnable(chain)
    instead, searches = stand_ins(chain, store, collection, public, share, isolate)
    if searches == (documents_key is not None):
        bound = "given if the chain has no search of its own" if documents_key is None else "None if the chain searches"
        raise InvalidParameter("documents_key", documents_key, bound)
    is_named_by_default = question_key is None
    question_key = "question" if question_key is None else question_key
    shown = searches_in(chain)
    if documents is None:
        documents = max((search.documents for search in shown), default=DOCUMENTS)
    documents = checks.whole("documents", documents)
    filters = narrowed(filter, fixed, filter_in(chain, shown))
    if eligible is None and threshold is not None and filters is None and visible_to is None:
        eligible = ELIGIBLE  # a guess about nearness: nobody can guess how many a filter lets through
    if members is None and calls is None:
        calls = CALLS
    if search_query is None:
        search_query = rewriting_of(chain)
    selector = PoissonExampleSelector(
        store,
        members,
        calls=calls,
        pad_to=pad_to,
        max_calls=max_calls,
        rate=rate,
        shots=shots,
        max_exemplars=documents,
        exemplars_per_owner=documents,  # one owner's documents may be the nearest: they lie in one bucket anyway
        threshold=threshold,
        eligible=eligible,
        nearest_to=question_key,
        filter=filters,
        visible_to=visible_to,
        search_query=search_query,
    )
    if asks not in (None, "text", "mapping", "messages"):
        raise InvalidParameter("asks", asks, '"text", "mapping" or "messages"')
    known = form_of(chain, question_key) if documents_key is None else "mapping"
    if asks is not None and known not in (None, asks):
        raise InvalidParameter("asks", asks, f'"{known}", which this chain takes, or None')
    form = known or asks
    if form is None:
        raise InvalidParameter(
            "asks",
            asks,
            '"text", "mapping" or "messages", since the chain\'s first step does not show it',
        )

    def as_asked(values: Mapping[str, Any]) -> Any:
        if form == "text":
            return values[question_key]
        asked = {key: value for key, value in values.items() if key != "examples"}
        if form == MESSAGES:
            asked.setdefault(MESSAGES, messages_of(values[question_key]))
        if documents_key is not None:
            asked[documents_key] = documents_of(values["examples"])
        return asked

    member: Runnable[Any, Any] = RunnableLambda(as_asked) | chain
    state = answered_state(chain)
    if MESSAGES in state and not (isinstance(chosen, Structured) and chosen.reads_any(state)):
        member |= RunnableLambda(answer_in)
    needed = keys_of(chain)[0] - {documents_key} if form == "mapping" else frozenset()
    also = needed - {question_key} if is_named_by_default and question_key not in needed else frozenset()
    ensemble = AskedEnsemble(
        selector,
        member,
        instead,
        form,
        question_key,
        documents_key,
        needed,
        next(iter(also)) if len(also) == 1 else None,
        max_concurrency=max_concurrency,
        timeout=timeout,
        public=public,
        allow_state=allow_state,
        share=share,
        isolate=isolate,
    )
    release = PrivateRAG(ensemble, DPAggregate(chosen, budget, line=line, return_receipt=return_receipt))
    if said := poor_plan(release):
        warnings.warn(said, PrivacyWarning, stacklevel=2)
    return release


class PrivateRAG(SealedRelease[T]):
    """The release that `wrap_rag` makes: it takes a text, or a mapping with it, and of an agent messages.

    ``asks`` is what the wrapped chain takes, "text", "mapping" or "messages".
    """

    def __init__(self, ensemble: AskedEnsemble, aggregate: DPAggregate[T]) -> None:
        super().__init__(ensemble, aggregate)
        self.name = "PrivateRAG"
        self.asks = ensemble.asks

    @property
    def InputType(self) -> Any:
        """A question, or a mapping with it."""
        return str | dict[str, Any]

    def __repr__(self) -> str:
        return f"PrivateRAG({self.ensemble!r}, {self.aggregator!r})"


class AskedEnsemble(PrivateEnsemble):
    """An ensemble that may be asked a bare text, and whose chain is asked in one form, however the release was."""

    def __init__(
        self,
        selector: PoissonExampleSelector,
        member: Runnable[Any, Any],
        instead: Sequence[tuple[object, object]],
        asks: Form,
        question_key: str,
        documents_key: str | None,
        needed: frozenset[str],
        also: str | None,
        **settings: Any,
    ) -> None:
        self.instead = instead
        super().__init__(selector, member, **settings)
        self.asks = asks
        self._question_key = question_key
        self._documents_key = documents_key
        self._needed = needed
        self._also = also

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
            values = self.mapping_of(values)
        if self.asks == "text" and not isinstance(values, Mapping):
            bound = f"a text, or a mapping with {self._question_key!r}; of a chat's messages the last one's text"
            raise InvalidParameter("input", type(values).__name__, bound)
        if isinstance(values, Mapping):
            values = self._completed(values)
            if self._documents_key in values:
                raise InvalidParameter(
                    "input",
                    [self._documents_key],
                    "a mapping without this key, which is filled",
                )
            if self.asks == "text" and set(values) != {self._question_key}:
                raise InvalidParameter(
                    "input",
                    sorted(map(str, values)),
                    f"a text, or a mapping with {self._question_key!r} alone: the chain takes a text",
                )
        return super().check_request(values)

    def _completed(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a request with its question under the question's key, and as messages if the chain takes those."""
        if self.asks == MESSAGES and MESSAGES in values:
            messages, said = read_messages(values[MESSAGES])
            return {self._question_key: said, **values, MESSAGES: messages}
        if self.asks == MESSAGES and isinstance(text := values.get(self._question_key), str):
            return {**values, MESSAGES: messages_of(text)}
        if self._also is not None and self._also in values:
            return {self._question_key: values[self._also], **values}
        return values

    def mapping_of(self, text: str) -> Mapping[str, Any]:
        """A plain text under the question's key, or also under the only one that the chain shows to need."""
        if self._also is not None:
            return {self._question_key: str(text), self._also: str(text)}
        return super().mapping_of(text)
