"""The private notes: a logger for the operator alone, who may see the records.

What follows private records (counts of them, a call that its server refused for ten minutes) is logged here and nowhere
else. Whatever other loggers are set to, this one is silent until `show` is called, or its level is set by its name:
also under a configuration that names its parents, which takes the level away.
"""

from __future__ import annotations

import logging
from typing import Final

NAME: Final = "langchain_dpicl.private_notes"
log: Final = logging.getLogger(NAME)
_SILENT: Final = logging.CRITICAL + 1


def shown() -> bool:
    """Return whether an operator has asked for the notes."""
    return log.level not in (logging.NOTSET, _SILENT)


class _IfShown(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return shown()


if log.level == logging.NOTSET:
    log.setLevel(_SILENT)
if not any(isinstance(each, _IfShown) for each in log.filters):
    log.addFilter(_IfShown())


def show() -> None:
    """Let the notes pass: the log is as confidential as the records then."""
    log.setLevel(logging.WARNING)
