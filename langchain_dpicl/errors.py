"""Every error of the package, as one tree.

::

    DPICLError
    ├── InvalidParameter (ValueError)      a parameter is outside its bounds
    │   └── InvalidConfiguration           a configuration file with mistakes: all of them
    ├── StoreError                         the exemplar store
    │   ├── InvalidRecords (ValueError)    records that cannot become exemplars
    │   ├── UnknownOwner (KeyError)        an owner that the store does not hold
    │   └── StoreFileError                 a saved store that cannot be read or written
    │       └── StoreFileChanged           another process has changed the file, or it is another store's
    ├── UnsafeConfigurationError           the surroundings would carry private text out
    │   └── ShutWithinCall                 a chain's call asked for the store, a budget or a release
    ├── ModelUnavailable                   the model fails on public input: nothing was charged
    │   └── MembersAbstained               a release says that the members gave no usable answer: charged
    ├── ReleaseFailed                      the private side failed after the charge, which stands
    │   └── ModelLost                      the model of a head's label scores: the same call resumes the fit
    ├── LocalModelError                    the embedded model cannot be found, checked or started
    ├── MissingExtra (ImportError)         an optional part of the package is not installed
    ├── PlanError                          the schedule
    │   ├── InfeasiblePlan                 no noise reaches the target
    │   ├── AccountingError                an accountant cannot certify a number here
    │   ├── PlanIncomplete                 a plan of several lines does not know all of them yet
    │   └── PlanMismatch                   the ledger holds another plan
    └── BudgetError                        the ledger
        ├── PrivacyBudgetExceeded          the plan's releases are spent: the answer is no
        │   └── QuotaExceeded              the caller's own part of them is spent: others may go on
        └── LedgerError                    the ledger cannot be opened, read or written

    PrivacyWarning (UserWarning)           legal, but worth a second thought

No message ever holds private text: messages name parameters, counts, positions and public bounds.
Errors that surface from the private side are raised outside ``except`` blocks, so they carry neither a cause nor a
context, and the frames that they pass hold no private values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class DPICLError(Exception):
    """The root: catch it to catch everything that this package raises on purpose."""


class InvalidParameter(DPICLError, ValueError):
    """A parameter is outside its bounds. It costs no budget.

    Parameters
    ----------
    parameter, value, bound
        The parameter's name, the value as the caller gave it (it must be public), and what is allowed, in words.
    """

    def __init__(self, parameter: str, value: object, bound: str) -> None:
        super().__init__(f"{parameter}={value!r} is not allowed: {bound}")
        self.parameter = parameter
        self.value = value
        self.bound = bound

    def __reduce__(self) -> tuple[type[InvalidParameter], tuple[str, object, str]]:
        return type(self), (self.parameter, self.value, self.bound)


class InvalidConfiguration(InvalidParameter):
    """A configuration file has mistakes. Names all of them, and shows no value: a file may hold secrets.

    Parameters
    ----------
    file, mistakes
        The file's name; pairs of a field ("" for the file as a whole) and words. `parameter` is the first one's.
    """

    def __init__(self, file: str, mistakes: Sequence[tuple[str, str]]) -> None:
        self.mistakes = tuple((field or file, words) for field, words in mistakes)
        super().__init__(self.mistakes[0][0], file, self.mistakes[0][1])
        count = "a mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
        self.args = ("\n".join([f"{file} has {count}:", *(f"  {field}: {words}" for field, words in self.mistakes)]),)

    def __reduce__(self) -> tuple[type[InvalidConfiguration], tuple[str, tuple[tuple[str, str], ...]]]:  # type: ignore[override]
        return type(self), (str(self.value), self.mistakes)


class _Constant(Exception):
    """An error whose message is always the same: it tells nothing but that it happened."""

    message: ClassVar[str]

    def __init__(self) -> None:
        super().__init__(self.message)

    def __reduce__(self) -> tuple[type[_Constant], tuple[()]]:
        return type(self), ()


class StoreError(DPICLError):
    """The exemplar store refuses: its records, its files, or the model that embeds them."""


class InvalidRecords(StoreError, ValueError):
    """Records that cannot become exemplars. Names positions and keys, never a record's text."""


class UnknownOwner(StoreError, KeyError):
    """The store holds no such owner."""

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return str(self.args[0]) if self.args else ""


class StoreFileError(StoreError):
    """A saved store cannot be read (missing, foreign, truncated, altered) or written."""


class StoreFileChanged(StoreFileError):
    """The file is not the one that this store knows: newer, older, or another store's. Nothing was written.

    Call `ExemplarStore.refresh` and save again where the file is newer; the message says what to do otherwise.
    """


class UnsafeConfigurationError(DPICLError):
    """The surroundings would carry private text out (global cache, debug mode), or a private part is used unsealed."""


class ShutWithinCall(_Constant, UnsafeConfigurationError):
    """A chain's call asked for the store, a budget or a release. The message is constant: it says nothing more."""

    message = (
        "the store, budgets and releases are shut while a call of a chain runs: a member gets its own examples as "
        "`examples`, by its selector or by store.as_vectorstore()"
    )


class ModelUnavailable(DPICLError):
    """The member fails on public input (server down, wrong key, broken chain). Raised before anything is charged."""


class MembersAbstained(_Constant, ModelUnavailable):
    """Most members abstain: the model is down, the member chain fails, or its answers are of no use.

    This is itself a private release (abstentions are counted and noised like an answer), so it was charged like one.
    Until the member answers a public request again, further requests raise `ModelUnavailable` and cost nothing.
    """

    message = (
        "most members gave no usable answer (by a noisy count, which was charged like any release): "
        "is the model up, does the member chain run on its own, and are its answers of the kind that is asked for?"
    )


class ReleaseFailed(_Constant, DPICLError):
    """The private side failed after the charge. The charge stands and the message is constant: it says nothing more."""

    message = "the release failed on the private side; its charge stands"


class ModelLost(ReleaseFailed):
    """The model of a head's label scores did not answer as at the start of the fit any more, for ten minutes.

    Public: it shows that the model was lost during the fit, not at which text. The charge stands. If the fit has an
    ``output``, the same call resumes it once the model is back.
    """

    message = (
        "the model of the label scores no longer answers as at the start of the fit; the charge stands. Once the "
        "model is back, the same call resumes a fit that has an output"
    )


class LocalModelError(DPICLError):
    """The embedded model is absent, altered, or does not start."""


class MissingExtra(DPICLError, ImportError):
    """An optional part of the package is not installed, or does not load. It costs no budget.

    Parameters
    ----------
    module, extra
        What was looked for, and the extra that brings it; `command` installs it.
    cause
        Why it does not load.
    """

    def __init__(self, module: str, extra: str, cause: str) -> None:
        self.module, self.extra, self.cause = module, extra, cause
        self.command = f'pip install "langchain-dpicl[{extra}]"'
        super().__init__(f"{module} is needed here and does not load ({cause}): {self.command}")

    def __reduce__(self) -> tuple[type[MissingExtra], tuple[str, str, str]]:
        return type(self), (self.module, self.extra, self.cause)


class PrivacyWarning(UserWarning):
    """Something legal that weakens the promise or reads private data: a large delta, an unsealed selection."""


class PlanError(DPICLError):
    """The schedule of releases cannot be solved, certified or opened."""


class InfeasiblePlan(PlanError):
    """No noise within the mechanism's range reaches the target. Says which line is too expensive, and why."""


class AccountingError(PlanError):
    """This accountant cannot certify a number for these parameters. Says which one can."""


class PlanIncomplete(PlanError):
    """A plan of several lines cannot be solved before each is known. Names those that are missing; costs nothing."""


class PlanMismatch(PlanError):
    """The ledger holds a plan with other parameters under this name. Plans are frozen at first use."""


class BudgetError(DPICLError):
    """The ledger refuses: the budget is spent, or the ledger is not usable."""


class PrivacyBudgetExceeded(BudgetError):
    """The plan's releases are spent. The request cost nothing; no later request can succeed."""


class QuotaExceeded(PrivacyBudgetExceeded):
    """The caller has had its own part of a shared budget. The request cost nothing; other callers' may succeed."""


class LedgerError(BudgetError):
    """The ledger cannot be opened, read or written. Nothing is released without a durable charge."""
