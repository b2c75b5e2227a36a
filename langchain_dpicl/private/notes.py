"""The private notes: a logger for the operator alone, who may see the records.

What follows private records (counts of them, a call that its server refused for ten minutes) is logged here and nowhere
else. Whatever the level of other loggers, this one is silent until `show` is called, or its level is set by its name.
"""

from __future__ import annotations

import logging
from typing import Final

NAME: Final = "langchain_dpicl.private_notes"
log: Final = logging.getLogger(NAME)
if log.level == logging.NOTSET:
    log.setLevel(logging.CRITICAL + 1)


def show() -> None:
    """Let the notes pass: the log is as confidential as the records then."""
    log.setLevel(logging.WARNING)
