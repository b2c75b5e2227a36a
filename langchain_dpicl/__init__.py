"""Differentially private in-context learning for LangChain.

Private examples in, public answers out: each answer is a noisy aggregate of parallel chain calls, each with the
examples of one owner (or of a few) out of a Poisson sample, and a durable budget counts every one of them.

Everything public is importable from here; what is heavy loads when it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from langchain_dpicl.aggregators import Aggregator as Aggregator
    from langchain_dpicl.aggregators import CandidateVote as CandidateVote
    from langchain_dpicl.aggregators import EmbeddingMean as EmbeddingMean
    from langchain_dpicl.aggregators import Keywords as Keywords
    from langchain_dpicl.aggregators import LabelVote as LabelVote
    from langchain_dpicl.aggregators import NoisyMean as NoisyMean
    from langchain_dpicl.aggregators import NoisyMedian as NoisyMedian
    from langchain_dpicl.aggregators import NoisyTopK as NoisyTopK
    from langchain_dpicl.aggregators import NoisyVote as NoisyVote
    from langchain_dpicl.aggregators import ReleasedKeywords as ReleasedKeywords
    from langchain_dpicl.aggregators import Structured as Structured
    from langchain_dpicl.aggregators import Words as Words
    from langchain_dpicl.budget import PrivacyBudget as PrivacyBudget
    from langchain_dpicl.budget import Receipt as Receipt
    from langchain_dpicl.decoding import Demonstrations as Demonstrations
    from langchain_dpicl.decoding import DemonstrationTemplate as DemonstrationTemplate
    from langchain_dpicl.decoding import DPSampler as DPSampler
    from langchain_dpicl.decoding import LogitsModel as LogitsModel
    from langchain_dpicl.decoding import ServerLogits as ServerLogits
    from langchain_dpicl.decoding import TransformersLogits as TransformersLogits
    from langchain_dpicl.decoding import synthesize_demonstrations as synthesize_demonstrations
    from langchain_dpicl.errors import AccountingError as AccountingError
    from langchain_dpicl.errors import BudgetError as BudgetError
    from langchain_dpicl.errors import DPICLError as DPICLError
    from langchain_dpicl.errors import InfeasiblePlan as InfeasiblePlan
    from langchain_dpicl.errors import InvalidConfiguration as InvalidConfiguration
    from langchain_dpicl.errors import InvalidParameter as InvalidParameter
    from langchain_dpicl.errors import InvalidRecords as InvalidRecords
    from langchain_dpicl.errors import LedgerError as LedgerError
    from langchain_dpicl.errors import LocalModelError as LocalModelError
    from langchain_dpicl.errors import MembersAbstained as MembersAbstained
    from langchain_dpicl.errors import MissingExtra as MissingExtra
    from langchain_dpicl.errors import ModelLost as ModelLost
    from langchain_dpicl.errors import ModelUnavailable as ModelUnavailable
    from langchain_dpicl.errors import PlanError as PlanError
    from langchain_dpicl.errors import PlanIncomplete as PlanIncomplete
    from langchain_dpicl.errors import PlanMismatch as PlanMismatch
    from langchain_dpicl.errors import PrivacyBudgetExceeded as PrivacyBudgetExceeded
    from langchain_dpicl.errors import PrivacyWarning as PrivacyWarning
    from langchain_dpicl.errors import QuotaExceeded as QuotaExceeded
    from langchain_dpicl.errors import ReleaseFailed as ReleaseFailed
    from langchain_dpicl.errors import ShutWithinCall as ShutWithinCall
    from langchain_dpicl.errors import StoreError as StoreError
    from langchain_dpicl.errors import StoreFileChanged as StoreFileChanged
    from langchain_dpicl.errors import StoreFileError as StoreFileError
    from langchain_dpicl.errors import UnknownOwner as UnknownOwner
    from langchain_dpicl.errors import UnsafeConfigurationError as UnsafeConfigurationError
    from langchain_dpicl.members.chains import keywords_to_answer as keywords_to_answer
    from langchain_dpicl.members.scoring import LabelScorer as LabelScorer
    from langchain_dpicl.once.collection import release_collection as release_collection
    from langchain_dpicl.once.evolution import EvolvedTexts as EvolvedTexts
    from langchain_dpicl.once.evolution import evolve_texts as evolve_texts
    from langchain_dpicl.once.head import PrivateHead as PrivateHead
    from langchain_dpicl.once.labelled import few_shot_chain as few_shot_chain
    from langchain_dpicl.once.labelled import label_public as label_public
    from langchain_dpicl.once.scores import LabelScores as LabelScores
    from langchain_dpicl.once.table import PrivateTable as PrivateTable
    from langchain_dpicl.once.tables_release import release_table as release_table
    from langchain_dpicl.once.terms import PrivateTerms as PrivateTerms
    from langchain_dpicl.once.terms_release import release_terms as release_terms
    from langchain_dpicl.once.topics import PrivateTopics as PrivateTopics
    from langchain_dpicl.once.topics_release import release_topics as release_topics
    from langchain_dpicl.once.views import View as View
    from langchain_dpicl.once.views import opening as opening
    from langchain_dpicl.once.views import whole as whole
    from langchain_dpicl.privacy import LineRequest as LineRequest
    from langchain_dpicl.privacy import PrivacyPlan as PrivacyPlan
    from langchain_dpicl.release.base import as_tool as as_tool
    from langchain_dpicl.release.ensemble import PrivateEnsemble as PrivateEnsemble
    from langchain_dpicl.release.sealed import DPAggregate as DPAggregate
    from langchain_dpicl.release.sealed import SealedRelease as SealedRelease
    from langchain_dpicl.release.threshold import ShareThreshold as ShareThreshold
    from langchain_dpicl.release.threshold import suggest_threshold as suggest_threshold
    from langchain_dpicl.release.transaction import acting_for as acting_for
    from langchain_dpicl.retrieval import DPRetriever as DPRetriever
    from langchain_dpicl.retrieval import wrap_rag as wrap_rag
    from langchain_dpicl.retrieval.middleware import DPRetrievalMiddleware as DPRetrievalMiddleware
    from langchain_dpicl.retrieval.middleware import DPToolMiddleware as DPToolMiddleware
    from langchain_dpicl.selection import PoissonExampleSelector as PoissonExampleSelector
    from langchain_dpicl.serving import add_dp_routes as add_dp_routes
    from langchain_dpicl.store import ExemplarStore as ExemplarStore
    from langchain_dpicl.store.filters import Condition as Condition
    from langchain_dpicl.store.parents import split_with_parents as split_with_parents
    from langchain_dpicl.store.store import PostgresExemplarStore as PostgresExemplarStore

__version__ = "0.1.0"

_HOMES = {
    "aggregators": (
        "Aggregator CandidateVote EmbeddingMean Keywords LabelVote NoisyMean NoisyMedian NoisyTopK NoisyVote "
        "ReleasedKeywords Structured Words"
    ),
    "budget": "PrivacyBudget Receipt",
    "decoding": (
        "DPSampler DemonstrationTemplate Demonstrations LogitsModel ServerLogits TransformersLogits "
        "synthesize_demonstrations"
    ),
    "errors": (
        "AccountingError BudgetError DPICLError InfeasiblePlan InvalidConfiguration InvalidParameter InvalidRecords "
        "LedgerError LocalModelError MembersAbstained MissingExtra ModelLost ModelUnavailable PlanError "
        "PlanIncomplete PlanMismatch PrivacyBudgetExceeded PrivacyWarning QuotaExceeded ReleaseFailed ShutWithinCall "
        "StoreError StoreFileChanged StoreFileError UnknownOwner UnsafeConfigurationError"
    ),
    "members.chains": "keywords_to_answer",
    "members.scoring": "LabelScorer",
    "once.collection": "release_collection",
    "once.evolution": "EvolvedTexts evolve_texts",
    "once.head": "PrivateHead",
    "once.labelled": "few_shot_chain label_public",
    "once.scores": "LabelScores",
    "once.table": "PrivateTable",
    "once.tables_release": "release_table",
    "once.terms": "PrivateTerms",
    "once.terms_release": "release_terms",
    "once.topics": "PrivateTopics",
    "once.topics_release": "release_topics",
    "once.views": "View opening whole",
    "privacy": "LineRequest PrivacyPlan",
    "release.base": "as_tool",
    "release.ensemble": "PrivateEnsemble",
    "release.sealed": "DPAggregate SealedRelease",
    "release.threshold": "ShareThreshold suggest_threshold",
    "release.transaction": "acting_for",
    "retrieval": "DPRetriever wrap_rag",
    "retrieval.middleware": "DPRetrievalMiddleware DPToolMiddleware",
    "selection": "PoissonExampleSelector",
    "serving": "add_dp_routes",
    "store": "ExemplarStore",
    "store.filters": "Condition",
    "store.parents": "split_with_parents",
    "store.store": "PostgresExemplarStore",
}
"""Where each public name lives, and so what loads when it is used."""
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    module = _HOME_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
