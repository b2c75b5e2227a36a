"""Differentially private in-context learning for LangChain.

Private examples in, public answers out: each answer is a noisy aggregate of N parallel chain calls that saw disjoint
Poisson samples of the owners, and a durable budget counts every one of them.

Everything public is importable from here; what is heavy loads when it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from langchain_dpicl.aggregators import Aggregator, EmbeddingMean, Keywords, NoisyVote, ReleasedKeywords, Words
    from langchain_dpicl.budget import PrivacyBudget, Receipt
    from langchain_dpicl.decoding import (
        Demonstrations,
        DemonstrationTemplate,
        DPSampler,
        LogitsModel,
        ServerLogits,
        TransformersLogits,
        synthesize_demonstrations,
    )
    from langchain_dpicl.errors import (
        AccountingError,
        BudgetError,
        DPICLError,
        InfeasiblePlan,
        InvalidParameter,
        InvalidRecords,
        LedgerError,
        LocalModelError,
        MembersAbstained,
        ModelUnavailable,
        PlanError,
        PlanIncomplete,
        PlanMismatch,
        PrivacyBudgetExceeded,
        PrivacyWarning,
        ReleaseFailed,
        StoreError,
        StoreFileChanged,
        StoreFileError,
        UnknownOwner,
        UnsafeConfigurationError,
    )
    from langchain_dpicl.members.downstream import keywords_to_answer
    from langchain_dpicl.members.scoring import LabelScorer
    from langchain_dpicl.privacy import LineRequest, PrivacyPlan
    from langchain_dpicl.release.base import acting_for, as_tool
    from langchain_dpicl.release.sealed import DPAggregate, PrivateEnsemble, SealedRelease
    from langchain_dpicl.release.threshold import release_threshold
    from langchain_dpicl.retrieval import DPRetriever, wrap_rag
    from langchain_dpicl.selection.selector import PoissonExampleSelector
    from langchain_dpicl.selection.share import ShareThreshold
    from langchain_dpicl.selection.suggest import suggest_threshold
    from langchain_dpicl.serving import add_dp_routes
    from langchain_dpicl.store import ExemplarStore
    from langchain_dpicl.store.postgres import PostgresExemplarStore

__version__ = "0.1.0"

_HOMES = {
    "release.sealed": ("DPAggregate", "PrivateEnsemble", "SealedRelease"),
    "aggregators": ("Aggregator", "EmbeddingMean", "Keywords", "NoisyVote", "ReleasedKeywords", "Words"),
    "budget": ("PrivacyBudget", "Receipt"),
    "decoding": (
        "DemonstrationTemplate",
        "Demonstrations",
        "DPSampler",
        "LogitsModel",
        "ServerLogits",
        "TransformersLogits",
        "synthesize_demonstrations",
    ),
    "members.downstream": ("keywords_to_answer",),
    "errors": (
        "AccountingError",
        "BudgetError",
        "DPICLError",
        "InfeasiblePlan",
        "InvalidParameter",
        "InvalidRecords",
        "LedgerError",
        "LocalModelError",
        "MembersAbstained",
        "ModelUnavailable",
        "PlanError",
        "PlanIncomplete",
        "PlanMismatch",
        "PrivacyBudgetExceeded",
        "PrivacyWarning",
        "ReleaseFailed",
        "StoreError",
        "StoreFileChanged",
        "StoreFileError",
        "UnknownOwner",
        "UnsafeConfigurationError",
    ),
    "privacy": ("LineRequest", "PrivacyPlan"),
    "release.base": ("acting_for", "as_tool"),
    "release.threshold": ("release_threshold",),
    "selection.share": ("ShareThreshold",),
    "selection.suggest": ("suggest_threshold",),
    "retrieval": ("DPRetriever", "wrap_rag"),
    "members.scoring": ("LabelScorer",),
    "selection.selector": ("PoissonExampleSelector",),
    "serving": ("add_dp_routes",),
    "store": ("ExemplarStore",),
    "store.postgres": ("PostgresExemplarStore",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "AccountingError",
    "Aggregator",
    "BudgetError",
    "DPAggregate",
    "DPICLError",
    "DPRetriever",
    "DPSampler",
    "DemonstrationTemplate",
    "Demonstrations",
    "EmbeddingMean",
    "ExemplarStore",
    "InfeasiblePlan",
    "InvalidParameter",
    "InvalidRecords",
    "Keywords",
    "LabelScorer",
    "LedgerError",
    "LineRequest",
    "LocalModelError",
    "LogitsModel",
    "MembersAbstained",
    "ModelUnavailable",
    "NoisyVote",
    "PlanError",
    "PlanIncomplete",
    "PlanMismatch",
    "PoissonExampleSelector",
    "PostgresExemplarStore",
    "PrivacyBudget",
    "PrivacyBudgetExceeded",
    "PrivacyPlan",
    "PrivacyWarning",
    "PrivateEnsemble",
    "Receipt",
    "ReleaseFailed",
    "ReleasedKeywords",
    "SealedRelease",
    "ServerLogits",
    "ShareThreshold",
    "StoreError",
    "StoreFileChanged",
    "StoreFileError",
    "TransformersLogits",
    "UnknownOwner",
    "UnsafeConfigurationError",
    "Words",
    "acting_for",
    "add_dp_routes",
    "as_tool",
    "keywords_to_answer",
    "release_threshold",
    "suggest_threshold",
    "synthesize_demonstrations",
    "wrap_rag",
]


def __getattr__(name: str) -> Any:
    module = _HOME_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
