"""From an error to the answer of a client: a status, a short name, a text without anything private. Never a trace.

`failure_of` has most. `limits` adds 408 (SlowRequest), 413 (TooLarge) and 503 (Busy), `routes` adds 401 (Unauthorized).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING

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


class Failure(Exception):
    """An answer that is an error. Raised, it refuses a request: nothing was charged."""

    def __init__(self, status: int, error: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.error, self.message, self.headers = status, error, message[:_LONGEST_TEXT], headers

    def response(self) -> Response:
        """Return it as JSON."""
        from starlette.responses import JSONResponse

        return JSONResponse({"error": self.error, "message": self.message}, self.status, self.headers)


def failure_of(error: BaseException, where: str) -> Failure:
    """Return the answer for an error. An unforeseen error goes to the log, by its class and place alone."""
    from fastapi.exceptions import RequestValidationError
    from starlette.exceptions import HTTPException

    match error:
        case Failure():
            return error
        case RequestValidationError():  # where and what, and nothing of the input
            errors = error.errors()
            faults = [f"{'.'.join(str(part)[:50] for part in e['loc'])}: {e['msg']}" for e in errors[:_MOST_FAULTS]]
            if more := len(errors) - len(faults):
                faults.append(f"and {more} more")
            return Failure(422, "InvalidInput", "; ".join(faults))
        case HTTPException():  # of the framework, or of the deployer's own code
            known = error.status_code in set(HTTPStatus)
            phrase = HTTPStatus(error.status_code).phrase if known else "Error"
            detail = error.detail if isinstance(error.detail, str) and error.detail else phrase
            return Failure(error.status_code, phrase.title().replace(" ", ""), detail, error.headers)
        case InvalidParameter(parameter="input"):  # any other parameter is the deployer's
            return Failure(422, "InvalidParameter", str(error))
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
