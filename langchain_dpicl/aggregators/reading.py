"""The reading of a member's output as a text, without what a model thinks before it answers; the comparison of texts.

Every aggregator that reads texts reads them by `answer_of`. Labels, values and words are compared as `plain` texts.
"""

from __future__ import annotations

import re
import unicodedata

from langchain_core.messages import BaseMessage

_INVISIBLE = re.compile(
    "[\u00ad\u034f\u061c\u180b-\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u206f\ufe00-\ufe0f\ufeff]"
)
"""Soft hyphens, zero-width spaces and joiners, marks of direction, variation selectors."""

_EDGES = " \t\r\n.,;:!?\"'`*()[]{}<>"

_TAGS = "think|thinking|thoughts?|reason|reasoning|reflection|scratchpad|analysis|inner_monologue|internal_monologue"
_MARK = re.compile(
    rf"</?(?:\w+:)?(?:ant)?(?:{_TAGS})\b[^<>/]*>"  # <think>, <seed:think>, <antThinking>
    r"|\[/?THINK\]"  # Mistral
    r"|◁/?think▷"  # Kimi
    r"|<\|(?:begin|start|end)(?:_of)?_(?:thought|thinking|reasoning)\|>",  # Sky-T1, Command A
    re.IGNORECASE,
)
"""Where thinking begins or ends."""

_CHANNEL = re.compile(r"<\|channel\|?>\s*(\w*)|<channel\|>")
"""Where gpt-oss begins a channel, of which the final one is the answer; and where Gemma ends the one before it."""

_CHANNELS_OF_TEXT = re.compile(r"\A\s*analysis(?=[A-Z])(?:.*assistant\s*(final))?", re.DOTALL)
"""The channels of gpt-oss, from a server that leaves special tokens out."""


def plain(text: str) -> str:
    """The text without invisible characters, its accents composed (NFC)."""
    return text if text.isascii() else unicodedata.normalize("NFC", _INVISIBLE.sub("", text))


def normal(text: str) -> str:
    """As labels are compared: `plain`, no case, no punctuation or space around, single spaces within."""
    if text.isascii():
        return " ".join(text.split()).strip(_EDGES).casefold()
    return plain(" ".join(plain(text).split()).strip(_EDGES).casefold())


def text_of(output: object) -> str | None:
    """The text of a model's answer, as a plain string of its own; None if there is none, or none can be read.

    Of a message it is the blocks of text: thinking in blocks of its own is left out.
    """
    try:
        text = output.text if isinstance(output, BaseMessage) else output
        return str.__str__(text) if isinstance(text, str) else None  # a subclass may have methods of any kind
    except Exception:
        return None


def answer_of(output: object) -> str | None:
    """`text_of` an answer without the model's thinking.

    None if the thinking has no end, or if the message has a tool call that cannot be read.
    """
    try:
        if isinstance(output, BaseMessage) and getattr(output, "invalid_tool_calls", None):
            return None
    except Exception:
        return None
    text = output if type(output) is str else text_of(output)
    return None if text is None else _without_thinking(text)


def _without_thinking(text: str) -> str | None:
    """Return what stands outside of the marks. An end without a beginning ends all that stands before it."""
    answer = _final_channel(text)
    if answer is None:
        return None
    kept: list[str] = []
    depth = start = 0
    for mark in _MARK.finditer(answer):
        is_end = "/" in mark[0] or mark[0].lower().startswith("<|end")
        if not is_end:
            if depth == 0:
                kept.append(answer[start : mark.start()])
            depth += 1
            continue
        if depth == 0:
            kept.clear()
        depth = max(0, depth - 1)
        start = mark.end()
    return None if depth else "".join([*kept, answer[start:]])


def _final_channel(text: str) -> str | None:
    """The channel that holds the answer; the whole text if it has no channels."""
    if bare := _CHANNELS_OF_TEXT.match(text):
        return text[bare.end() :] if bare[1] else None
    channels = list(_CHANNEL.finditer(text))
    if not channels:
        return text
    last = channels[-1]
    rest = text[last.end() :]
    if last[1] is None:
        return rest
    if last[1].lower() != "final":
        return None
    _, found, content = rest.partition("<|message|>")
    return re.split(r"<\|(?:return|end)\|>", content if found else rest)[0]
