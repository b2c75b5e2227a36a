"""wrap_rag: the user's own retrieval chain, as the member over buckets of private documents; and how it is asked."""

from __future__ import annotations

import operator
import warnings
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
from langchain_core.runnables.base import RunnableBindingBase, coerce_to_runnable
from langchain_core.runnables.configurable import DynamicRunnable
from langchain_core.vectorstores import VectorStore, VectorStoreRetriever

from langchain_dpicl.aggregators import Aggregator, CandidateVote
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
from langchain_dpicl.private.reach import is_named
from langchain_dpicl.release.advice import poor_plan
from langchain_dpicl.release.base import AnyRelease
from langchain_dpicl.release.ensemble import PrivateEnsemble
from langchain_dpicl.release.sealed import DPAggregate, SealedRelease
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

Form = Literal["text", "mapping"]

_WRAPPERS = (
    (RunnableBindingBase, "bound"),
    (RunnableWithFallbacks, "runnable"),
    (DynamicRunnable, "default"),
)
_OF_MAPPINGS = ("langgraph.pregel.main.Pregel", "langchain_classic.chains.base.Chain")


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
    question_key: str = "question",
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
        answer, as a rule a text: ``chain.pick("answer")`` for a mapping.
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
        As for `PoissonExampleSelector`: how many owners a typical question finds eligible, a public estimate. Default:
        a fifth of the owners when the plan is made (at least twice the calls, at most all): a guess, and safe for
        privacy if it is wrong. A better one buys more: where twice as many are eligible there are twice the calls, for
        no less noise; where only half of them are, half.
    filter, visible_to
        As for `PoissonExampleSelector`: which documents count for a request, and for its caller. A filter of the
        ``source``'s search settings counts beside it, and so do those of the chain's searches, if each has one.
    search_query
        As for `PoissonExampleSelector`: what makes the text that documents are near to, such as one question of a
        chat's history. Default: the chain's own rewriting if a model makes the text for its retriever, as in
        `create_history_aware_retriever`; needed if the chain rewrites where that cannot be found.
    asks
        What the chain takes: a "text" or a "mapping". Default: what its first steps show (a retriever takes a text; a
        prompt, an assignment, an ``itemgetter``, a graph a mapping). Needed for others, such as a function.
    question_key
        The key of the question, a text, in mappings that the chain takes and in requests. Documents are near to it.
    documents_key
        For a chain without a retriever: the key under which its input gets the list of LangChain documents.
    owner_key
        The metadata entry that names the owner, if ``source`` is a collection. Without it each document is its own.
    max_concurrency, timeout, public, share, isolate
        As for `PrivateEnsemble`.

    The release takes a text, or a mapping with the text under ``question_key``: the same request, which reaches the
    chain in the form that it takes, from `DPRetriever` and `as_tool` too. A chain that takes a mapping gets the
    caller's further keys, and a request without those that its first steps need is refused and costs nothing. The
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
    shown = searches_in(chain)
    if documents is None:
        documents = max((search.documents for search in shown), default=DOCUMENTS)
    documents = checks.whole("documents", documents)
    filters = narrowed(filter, fixed, filter_in(chain, shown))
    if eligible is None and (threshold is not None or filters is not None or visible_to is not None):
        eligible = ELIGIBLE
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
    if asks not in (None, "text", "mapping"):
        raise InvalidParameter("asks", asks, '"text" or "mapping"')
    known = form_of(chain) if documents_key is None else "mapping"
    if asks is not None and known not in (None, asks):
        raise InvalidParameter("asks", asks, f'"{known}", which this chain takes, or None')
    form = known or asks
    if form is None:
        raise InvalidParameter(
            "asks",
            asks,
            '"text" or "mapping", since the chain\'s first step does not show it',
        )

    def as_asked(values: Mapping[str, Any]) -> Any:
        if form == "text":
            return values[question_key]
        asked = {key: value for key, value in values.items() if key != "examples"}
        if documents_key is not None:
            asked[documents_key] = documents_of(values["examples"])
        return asked

    ensemble = AskedEnsemble(
        selector,
        RunnableLambda(as_asked) | chain,
        instead,
        form,
        question_key,
        documents_key,
        keys_of(chain)[0],
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
    """The release that `wrap_rag` makes: it takes a text, or a mapping with it.

    ``asks`` is what the wrapped chain takes, "text" or "mapping".
    """

    def __init__(self, ensemble: AskedEnsemble, aggregate: DPAggregate[T]) -> None:
        super().__init__(ensemble, aggregate)
        self.name = "PrivateRAG"
        self.asks = ensemble.asks

    @property
    def InputType(self) -> Any:
        """A question, or a mapping with it."""
        return str | dict[str, Any]

    def invoke(
        self,
        input: str | dict[str, Any],
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> T:
        """One release."""
        return super().invoke(input, config, **kwargs)  # type: ignore[arg-type]

    async def ainvoke(
        self,
        input: str | dict[str, Any],
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> T:
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
        instead: Sequence[tuple[object, object]],
        asks: Form,
        question_key: str,
        documents_key: str | None,
        needed: frozenset[str],
        **settings: Any,
    ) -> None:
        self.instead = instead
        super().__init__(selector, member, **settings)
        self.asks = asks
        self._question_key = question_key
        self._documents_key = documents_key
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


def form_of(part: Any) -> Form | None:
    """Return the form that a chain takes, a text or a mapping, as far as its first steps show it."""
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
