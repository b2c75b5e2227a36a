"""From an error to the answer of a client: a status, a short name, a text without anything private. Never a trace.

======  ==========================  ===========================================================================
status  error                       when
======  ==========================  ===========================================================================
401     Unauthorized                the request has no authenticated caller
408     SlowRequest                 the body did not arrive in time
413     TooLarge                    the body is too long
422     InvalidInput                JSON, schema, or the number of inputs
422     InvalidParameter            the release refuses the input
429     PrivacyBudgetExceeded       the releases are spent
500     ReleaseFailed               the private side failed; charged
500     InternalError               everything else
503     Busy                        too many releases are under way; ask again
503     ModelUnavailable            the model fails on public input; not charged
503     MembersAbstained            the model is down, says a release; charged
503     LedgerUnavailable           the ledger cannot be used
======  ==========================  ===========================================================================
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field

from langchain_dpicl.errors import (
    InvalidParameter,
    LedgerError,
    MembersAbstained,
    ModelUnavailable,
    PrivacyBudgetExceeded,
    ReleaseFailed,
)

if TYPE_CHECKING:
    from starlette.responses import Response

logger = logging.getLogger(__name__)

_MOST_FAULTS = 5
_LONGEST_TEXT = 1000


class ErrorAnswer(BaseModel):
    """The body of every error."""

    error: str = Field(description="A short name that does not change.")
    message: str = Field(description="What happened, for people.")


@dataclass(frozen=True)
class Failure:
    """An answer that is an error."""

    status: int
    error: str
    message: str
    headers: Mapping[str, str] = field(default_factory=dict)

    def response(self) -> Response:
        """Return it as JSON."""
        from starlette.responses import JSONResponse

        return JSONResponse({"error": self.error, "message": self.message}, self.status, dict(self.headers))


class Refused(Exception):
    """A request that is not carried out. Nothing was charged for it."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


UNAUTHORIZED = Failure(401, "Unauthorized", "this request has no authenticated caller")
BUSY = Failure(503, "Busy", "too many releases are under way; nothing was charged, ask again", {"Retry-After": "1"})


def invalid(message: str) -> Refused:
    """Return a 422 for bad input."""
    return Refused(Failure(422, "InvalidInput", message[:_LONGEST_TEXT]))


def failure_of(error: BaseException, where: str) -> Failure:
    """Return the answer for an error. An unforeseen error goes to the log, by its class and place alone."""
    from fastapi.exceptions import RequestValidationError
    from starlette.exceptions import HTTPException

    match error:
        case Refused():
            return error.failure
        case RequestValidationError():  # where and what, and nothing of the input
            errors = error.errors()
            faults = [f"{'.'.join(str(part)[:50] for part in e['loc'])}: {e['msg']}" for e in errors[:_MOST_FAULTS]]
            more = len(errors) - len(faults)
            return invalid("; ".join(faults) + (f"; and {more} more" if more > 0 else "")).failure
        case HTTPException():
            return of_http(error)
        case InvalidParameter(parameter="input"):  # any other parameter is the deployer's
            return Failure(422, "InvalidParameter", str(error)[:_LONGEST_TEXT])
        case PrivacyBudgetExceeded():
            return Failure(429, "PrivacyBudgetExceeded", str(error))
        case MembersAbstained():
            message = "the model gave no usable answer, says a release, which was charged; later requests may succeed"
            return Failure(503, "MembersAbstained", message)
        case ModelUnavailable():
            return Failure(503, "ModelUnavailable", "the model does not answer now; nothing was charged")
        case LedgerError():
            logger.error("%s: the ledger cannot be used: %s", where, error)
            message = "the ledger cannot be used now; without it nothing is released, and what it has charged stands"
            return Failure(503, "LedgerUnavailable", message)
        case ReleaseFailed():
            return Failure(500, "ReleaseFailed", str(error))
    place, trace = "an unknown place", error.__traceback__
    while trace is not None:
        place, trace = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}", trace.tb_next
    logger.error("%s: %s at %s", where, type(error).__qualname__, place)
    return Failure(500, "InternalError", "the server failed; a charge that was made stands")


def of_http(error: Any) -> Failure:
    """Return our form of an HTTP error that the framework or the deployer's own code raised."""
    try:
        phrase = HTTPStatus(error.status_code).phrase
    except ValueError:
        phrase = "Error"
    detail = error.detail if isinstance(error.detail, str) and error.detail else phrase
    return Failure(error.status_code, phrase.title().replace(" ", ""), detail, dict(error.headers or {}))
