"""The invented clinic's answers to its inbox: what it wrote back, as private examples of how to answer.

Like the inbox itself, nothing is copied from anywhere, no person is real, and the seed makes the data, not the privacy.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from langchain_dpicl.demo.inbox import DESKS, INPUT_KEY, OUTPUT_KEY

REPLY_KEY = "reply"

PUBLIC_REPLIES = (
    "We phone you within 48 hours about your prescription.",
    "We phone you within 48 hours about your bill.",
    "We phone you within 48 hours about your appointment.",
    "Please send us a letter by post.",
    "Please go to the emergency room at once.",
    "Please come to the front desk with your insurance card.",
)
"""Sentences that the clinic would show anybody."""

PUBLIC_WORDS = (
    "phone hours 48 week letter post emergency room desk insurance card prescription bill appointment pharmacy doctor"
).split()
"""Words that the clinic would show anybody."""

PUBLIC_PROMPT = """Patient: Where can I park?
Reply with the following word suggestions: parking, behind, clinic.
Please use the parking behind the clinic.

Patient: I lost my card.
Reply with the following word suggestions: desk, new, card.
Please come to the desk for a new card.

Patient: {input}
Reply{suggestions}.
"""
"""How a model writes a reply from keywords; its examples are made up and public."""

_TOPIC = {"pharmacy": "prescription", "billing": "bill", "appointments": "appointment"}
_TOPIC_OF = {desk: _TOPIC[matter] for matter, desk in DESKS.items()}
_OPENING = ("Thank you, we", "Thanks for your message, we", "We got your message and", "We")
_REPLY = "{opening} phone you within 48 hours about {your} {topic}."


def with_replies(records: Sequence[Mapping[str, str]], *, seed: int = 7) -> list[dict[str, str]]:
    """The inbox's records, each with what the clinic wrote back. The same arguments give the same replies."""
    rng = random.Random(seed)
    answered = []
    for record in records:
        words = {"opening": rng.choice(_OPENING), "your": rng.choice(("your", "the"))}
        answered.append({**record, REPLY_KEY: _REPLY.format(**words, topic=_TOPIC_OF[record[OUTPUT_KEY]])})
    return answered


def reply_prompt(values: Mapping[str, object]) -> str:
    """A member's prompt: the private examples, then the query."""
    examples = f"{values['examples']:s}\n\n" if values["examples"] else ""
    return f"{examples}{INPUT_KEY.capitalize()}: {values['input']}\n{REPLY_KEY.capitalize()}:"
