"""A member that chooses among labels by log-probabilities instead of free text.

:class:`LabelScorer` asks the model for its next tokens after "Label:" with the log-probabilities of the alternatives,
and follows the greedy answer token by token. Where a label leaves the greedy answer, the probability of the tokens that
lead to it is the label's score:

- a token that only one label can start with (leading spaces and case aside) gives that label its probability;
- a token that several labels share is settled by the next position if the greedy answer takes it, else shared evenly;
- a token that fits every label, such as a space, tells none from another;
- a label outside the alternatives that the server returned gets the least likely of these: the most it can have. If
  none of the labels is among them after examples, there is no score: the scorer raises, and as a member it abstains.

For labels whose first tokens differ, the score is the model's probability of the label's first token, exactly.

Contextual calibration (Zhao et al., "Calibrate Before Use", 2021) then divides the scores by those of the same prompt
with the query replaced by a content-free text, which removes the bias that the labels and the examples bring along. A
text that looks like a query but asks for nothing can calibrate better than "N/A": on the demonstration's inbox, with a
270M model and 4 examples, 69 % of single answers were right instead of 54 % (uncalibrated: 46 %); on TREC it did not.
"""

from __future__ import annotations

import codecs
import copy
import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import geometric_mean
from typing import Any, NamedTuple

from langchain_core.language_models import BaseLanguageModel
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.language_models.llms import BaseLLM
from langchain_core.outputs import ChatGeneration, Generation, LLMResult
from langchain_core.prompt_values import ChatPromptValue, PromptValue, StringPromptValue
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import patch_config

from langchain_dpicl.aggregators.reading import plain
from langchain_dpicl.aggregators.votes import check_labels
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.privacy import checks

DEFAULT_INSTRUCTION = "Labels: {labels}."

Prompt = Runnable[dict[str, Any], Any] | Callable[[dict[str, Any]], Any]


class Position(NamedTuple):
    """One position of the greedy answer: the token taken and the alternatives, as (bytes, probability)."""

    taken: bytes
    top: list[tuple[bytes, float]]


class LabelScorer(Runnable[dict[str, Any], str]):
    """Answer with the label that the model finds likeliest, given the examples.

    Input: the caller's mapping, with the query under ``query_key`` and ``examples``, a sequence of mappings that hold
    an input and an output (absent or empty: the zero-shot prompt). Output: one of ``labels``.

    Parameters
    ----------
    llm
        A LangChain completion or chat model whose server returns log-probabilities. A copy
        without cache, verbosity and callbacks of its own is used.
    labels
        At least two strings that differ in more than case and surrounding space. Distinct first words score best.
    prompt
        From ``{**input, "examples": [...], "labels": [...]}`` to a prompt (string, messages or ``PromptValue``): a
        Runnable or a function. It should end where the label begins. Default: :func:`label_prompt`.
    calibrate
        Divide by the scores of the prompt whose query is ``content_free``.
    content_free
        A text without content, or several: then the geometric mean of their scores counts, for one prompt more each.
    input_key, output_key
        The keys of an example; default: those of the store that the examples come from, else ``text`` and ``label``.
    top_logprobs
        Alternatives per position to ask for. Servers have limits (OpenAI: 20 for chat, 5 for completions).
    max_tokens
        Tokens of the greedy answer; default: enough for the labels' longest common beginning.
    instruction
        First line of the default prompt; ``{labels}`` becomes the list of labels.

    Raises
    ------
    InvalidParameter
        From the constructor for bad arguments; from a call if the input lacks the query, an example lacks a key,
        the server returns no log-probabilities, or one that is no number or above 0 (by more than rounding), or if no
        label is among the alternatives after examples: a model that thinks first, or answers in sentences, has none
        there. (Without examples a small model may name none and yet answer real requests: its scores are then even.)
        The messages show no text of the input.
    """

    def __init__(
        self,
        llm: BaseLanguageModel[Any],
        labels: Sequence[str],
        *,
        prompt: Prompt | None = None,
        calibrate: bool = True,
        query_key: str = "input",
        content_free: str | Sequence[str] = "N/A",
        top_logprobs: int = 20,
        max_tokens: int | None = None,
        input_key: str | None = None,
        output_key: str | None = None,
        instruction: str = DEFAULT_INSTRUCTION,
    ) -> None:
        if not isinstance(llm, BaseChatModel | BaseLLM):
            raise InvalidParameter("llm", type(llm).__name__, "a LangChain chat or completion model")
        checked = check_labels("labels", labels)
        if len({_normal(label).rstrip() for label in checked}) < len(checked) or not all(map(_normal, checked)):
            bound = "labels that differ in more than case, quotes and space around them"
            raise InvalidParameter("labels", labels, bound)
        self.labels = tuple(label.strip() for label in checked)
        self.top_logprobs = checks.whole("top_logprobs", top_logprobs, at_least=2)
        if max_tokens is None:
            # The longest beginning that two labels share, in bytes (no token is shorter), and one more; at most 16.
            known = sorted(_normal(label).encode() for label in self.labels)
            pairs = list(pairwise(known))
            max_tokens = next(n for n in range(1, 17) if n == 16 or all(a[:n] != b[:n] for a, b in pairs))
        self.max_tokens = checks.whole("max_tokens", max_tokens)
        if prompt is not None and not isinstance(prompt, Runnable) and not callable(prompt):
            raise InvalidParameter("prompt", type(prompt).__name__, "a Runnable, a function or None")
        texts = (content_free,) if isinstance(content_free, str) else tuple(content_free)
        if not texts or not all(isinstance(text, str) for text in texts):
            raise InvalidParameter("content_free", content_free, "a string, or several")
        if not isinstance(query_key, str) or not query_key:
            raise InvalidParameter("query_key", query_key, "a key: a string that is not empty")
        for name, value in (("input_key", input_key), ("output_key", output_key)):
            if value is not None and (not isinstance(value, str) or not value):
                raise InvalidParameter(name, value, "a key (a string that is not empty) or None")
        self.llm: BaseChatModel | BaseLLM = llm.model_copy(update={"cache": False, "verbose": False, "callbacks": None})
        self.prompt = prompt
        self.calibrate = bool(calibrate)
        self.instruction = instruction
        self.query_key = query_key
        self.input_key = input_key
        self.output_key = output_key
        self.content_free = texts

    @property
    def calls(self) -> int:
        """Prompts per answer: 1, and with calibration 1 more per content-free text. Public and constant, as
        ``max_tokens`` is: both follow from the constructor's arguments, never from what comes back."""
        return 1 + len(self.content_free) * self.calibrate

    def __repr__(self) -> str:
        return (
            f"LabelScorer(llm={type(self.llm).__name__}, labels={list(self.labels)}, calibrate={self.calibrate}, "
            f"calls={self.calls}, max_tokens={self.max_tokens})"
        )

    @property
    def input_variables(self) -> list[str]:
        """The keys that a request needs, as a prompt template calls them."""
        return [self.query_key]

    def invoke(self, input: dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any) -> str:
        """The label with the highest score; the earlier one in a tie."""
        return self._call_with_config(self._answer, input, config)

    async def ainvoke(self, input: dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any) -> str:
        """:meth:`invoke`, waiting for the model without blocking."""
        return await self._acall_with_config(self._aanswer, input, config)

    def scores(self, input: dict[str, Any], config: RunnableConfig | None = None) -> dict[str, float]:
        """Every label's calibrated score; they add up to 1. Raises `InvalidParameter` if there are none: see above."""
        found = [self.llm.generate_prompt(**asked) for asked in self._requests(input, config)]
        return self._combine(found, bool(input.get("examples")))

    async def ascores(self, input: dict[str, Any], config: RunnableConfig | None = None) -> dict[str, float]:
        """:meth:`scores`, waiting for the model without blocking."""
        found = [await self.llm.agenerate_prompt(**asked) for asked in self._requests(input, config)]
        return self._combine(found, bool(input.get("examples")))

    def prior(self, public_texts: Sequence[str]) -> PublicPrior:
        """Label probabilities without private examples, calibrated on public texts: `PublicPrior`."""
        return PublicPrior(self, public_texts)

    def _answer(self, input: dict[str, Any], run_manager: Any, config: RunnableConfig) -> str:
        scores = self.scores(input, patch_config(config, callbacks=run_manager.get_child()))
        return max(scores, key=scores.__getitem__)

    async def _aanswer(self, input: dict[str, Any], run_manager: Any, config: RunnableConfig) -> str:
        scores = await self.ascores(input, patch_config(config, callbacks=run_manager.get_child()))
        return max(scores, key=scores.__getitem__)

    def _requests(self, input: dict[str, Any], config: RunnableConfig | None) -> list[dict[str, Any]]:
        """The calls to the model: one for each prompt, or one for all if the model shares the prefix."""
        if not isinstance(input, Mapping) or self.query_key not in input:
            raise InvalidParameter("query_key", self.query_key, "a key of the input")
        examples = input.get("examples") or []
        text = self.input_key or getattr(examples, "input_key", None) or "text"
        label = self.output_key or getattr(examples, "output_key", None) or "label"
        if not all(isinstance(each, Mapping) and text in each and label in each for each in examples):
            raise InvalidParameter("examples", type(examples).__name__, f"mappings with the keys {text!r}, {label!r}")
        queries = [input[self.query_key], *self.content_free] if self.calibrate else [input[self.query_key]]
        prompts: list[PromptValue] = []
        for query in queries:
            values = {**input, "examples": examples, self.query_key: query, "labels": list(self.labels)}
            made: Any
            if self.prompt is None:
                pairs = [(str(each[text]), str(each[label])) for each in examples]
                instruction = self.instruction.replace("{labels}", ", ".join(self.labels))
                made = label_prompt(pairs, str(query), instruction=instruction)
            else:
                made = self.prompt.invoke(values, config) if isinstance(self.prompt, Runnable) else self.prompt(values)
            if isinstance(made, str):
                made = StringPromptValue(text=made)
            prompts.append(made if isinstance(made, PromptValue) else ChatPromptValue(messages=list(made)))
        settings: dict[str, Any] = {"max_tokens": self.max_tokens, "temperature": 0, "logprobs": self.top_logprobs}
        if isinstance(self.llm, BaseChatModel):
            settings |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        settings["callbacks"] = (config or {}).get("callbacks")
        if len(prompts) == 1 or not getattr(self.llm, "accepts_shared_prefix", False):
            return [{**settings, "prompts": [prompt]} for prompt in prompts]
        return [{**settings, "prompts": prompts, "shared_prefix": True}]

    def _combine(self, results: list[LLMResult], has_examples: bool) -> dict[str, float]:
        scored: list[list[float]] = []
        for generation in (generation[0] for result in results for generation in result.generations):
            positions = _positions(generation)
            if not positions:
                bound = "its server must return log-probabilities for generated tokens"
                raise InvalidParameter("llm", type(self.llm).__name__, bound)
            found, tells = _label_scores(positions, self.labels)
            if not tells and has_examples and not scored:  # content-free prompts need not tell
                bound = "labels of which one begins among the model's alternatives (is it thinking first?)"
                raise InvalidParameter("labels", list(self.labels), bound)
            scored.append(found)
        values = scored[0]
        if len(scored) > 1:
            values = [value / geometric_mean(free) for value, *free in zip(*scored, strict=True)]
        total = math.fsum(values)
        return {label: value / total for label, value in zip(self.labels, values, strict=True)}


class PublicPrior(Runnable[dict[str, Any], dict[str, float]]):
    """From a query to a probability of each label, without private examples: `NoisyVote(labels, prior=...)`.

    A model prefers some labels whatever it is asked. So its zero-shot scores of a query are divided by what they are
    for public texts in general, the geometric mean over ``public_texts``, and made to add up to 1: on average over
    these texts no label is ahead. They should look like the queries, and have the labels about equally often.

    The texts must be PUBLIC (or made up), never records of the store: a vote uses its prior at no cost. They are scored
    once, before the first query is answered, with one call of the model each; the scorer's prompt gets them under its
    ``query_key``, and no other key. Every query then takes one call, whatever the scorer's own calibration is.
    """

    def __init__(self, scorer: LabelScorer, public_texts: Sequence[str]) -> None:
        alone = isinstance(public_texts, str) or not isinstance(public_texts, Sequence)
        if alone or not public_texts or not all(isinstance(text, str) and text.strip() for text in public_texts):
            raise InvalidParameter("public_texts", type(public_texts).__name__, "a list of texts that are not empty")
        self.scorer = copy.copy(scorer)
        self.public_texts = tuple(public_texts)
        self.scorer.calibrate = False
        self._usual: list[float] | None = None
        """The geometric mean of each label's scores. Two first queries at once compute the same."""

    def invoke(self, input: dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any) -> dict[str, float]:
        """The probabilities of all labels."""
        return self._call_with_config(self._answer, input, config)

    async def ainvoke(
        self, input: dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any
    ) -> dict[str, float]:
        """:meth:`invoke`, waiting for the model without blocking."""
        return await self._acall_with_config(self._aanswer, input, config)

    def _answer(self, input: dict[str, Any], run_manager: Any, config: RunnableConfig) -> dict[str, float]:
        inner = patch_config(config, callbacks=run_manager.get_child())
        scored = [self.scorer.scores(asked, inner) for asked in self._asked(input)]
        return self._divided(scored)

    async def _aanswer(self, input: dict[str, Any], run_manager: Any, config: RunnableConfig) -> dict[str, float]:
        inner = patch_config(config, callbacks=run_manager.get_child())
        scored = [await self.scorer.ascores(asked, inner) for asked in self._asked(input)]
        return self._divided(scored)

    def _asked(self, input: Any) -> list[Any]:
        """The query without any example, and the public texts if they have no scores yet."""
        query = {**input, "examples": ()} if isinstance(input, Mapping) else input
        texts = self.public_texts if self._usual is None else ()
        return [query, *({self.scorer.query_key: text} for text in texts)]

    def _divided(self, scored: list[dict[str, float]]) -> dict[str, float]:
        scores, *others = scored
        if others:
            self._usual = [geometric_mean(values) for values in zip(*(each.values() for each in others), strict=True)]
        values = [score / usual for score, usual in zip(scores.values(), self._usual or (), strict=True)]
        total = math.fsum(values)
        return {label: value / total for label, value in zip(scores, values, strict=True)}

    def __repr__(self) -> str:
        digest = hashlib.sha256("\0".join(self.public_texts).encode()).hexdigest()
        return f"PublicPrior({self.scorer!r}, {len(self.public_texts)} texts, {digest[:16]})"


def label_prompt(examples: Sequence[tuple[str, str]], query: str, *, instruction: str) -> str:
    """The default prompt: instruction, examples, query, in this order, so that calls differ only at their end.

    Runs of white space become one space, so that no text can pass for another example.
    """
    blocks = [f"Input: {' '.join(text.split())}\nLabel: {' '.join(label.split())}" for text, label in examples]
    head = [instruction] if instruction else []
    return "\n\n".join([*head, *blocks, f"Input: {' '.join(query.split())}\nLabel:"])


def label_scores(positions: Sequence[Position], labels: Sequence[str]) -> list[float]:
    """Probability mass per label along the greedy answer; every score is positive.

    ``positions`` come from the server; ``labels`` are distinct once normalised. See the module's text for the rule.
    """
    return _label_scores(positions, labels)[0]


def _label_scores(positions: Sequence[Position], labels: Sequence[str]) -> tuple[list[float], bool]:
    """`label_scores`, and whether they tell the labels apart.

    They do not if the answer leaves all labels at a position where no alternative belongs to some of them and not to
    others, or ends before such a position.
    """
    known = [_normal(label) for label in labels]
    scores = [0.0] * len(labels)
    alive = frozenset(range(len(labels)))
    mass = 1.0
    path = b""
    tells = False
    for taken, top in positions:
        gained = [0.0] * len(labels)
        told = False
        onward: frozenset[int] = frozenset()
        for token, p in top:
            fits = _fitting(path, token, known) & alive
            told = told or 0 < len(fits) < len(alive)
            if token == taken:
                onward = fits
            if token != taken or len(fits) == 1:
                for i in fits:
                    gained[i] += mass * p / len(fits)
        tells = told or (tells and bool(onward))
        least = mass * min(p for _, p in top)
        for i in alive:
            scores[i] += gained[i] if i in onward else gained[i] or least
        path += taken
        mass *= dict(top).get(taken, 0.0)
        alive = onward
        if len(alive) < 2:
            break
    else:
        for i in alive:  # still undecided after the last token
            scores[i] += mass / len(alive)
    return [max(score, 1e-30) for score in scores], tells  # underflow: a score of zero could not be divided by


_ROUNDING = 1e-3
"""How far above 0 a server's rounding may lift a log-probability."""

_END = re.compile(rb"(<\|[^|]*\|>|</?s>|<eos>|<end_of_turn>|<\xef\xbd\x9c.*\xef\xbd\x9c>)?")


def _fitting(path: bytes, token: bytes, known: Sequence[str]) -> frozenset[int]:
    """The labels that an answer beginning with ``path + token`` may still become, or has become."""
    ended = _END.fullmatch(token) is not None
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = _normal(decoder.decode(path if ended else path + token))
    if ended:
        return frozenset(i for i, label in enumerate(known) if label == text.rstrip())
    pending = decoder.getstate()[0]  # a character that the next token completes

    def continues(label: str) -> bool:
        following = label[len(text) : len(text) + 1]
        completes = any(c.encode().startswith(pending) for c in (following, following.upper()) if c)
        return label.startswith(text) and (not pending or completes)

    if fitting := frozenset(i for i, label in enumerate(known) if continues(label)):
        return fitting

    def ends_word(at: int) -> bool:
        return at < len(text) and not (text[at].isalnum() and text[at - 1].isalnum())

    finished = [i for i, label in enumerate(known) if text.startswith(label) and ends_word(len(label))]
    return frozenset([max(finished, key=lambda i: len(known[i]))] if finished else [])


def _normal(text: str) -> str:
    """As labels are compared: composed characters, no case, no space or quote in front (tokenisers' marks included)."""
    composed = plain(plain(text.replace("\u2581", " ").replace("\u0120", " ")).casefold())
    return composed.lstrip(" \t\r\n\"'*`")


def _positions(generation: Generation) -> list[Position]:
    """Log-probabilities in either of OpenAI's two shapes; empty if there are none."""
    found: Any = (generation.generation_info or {}).get("logprobs")
    if not found and isinstance(generation, ChatGeneration):
        found = generation.message.response_metadata.get("logprobs")
    if not isinstance(found, Mapping):
        return []
    raw: list[list[tuple[bytes, float | None]]] = []  # for each position the token taken, then the alternatives
    if found.get("content"):
        for item in found["content"]:
            raw.append([])
            for each in (item, *(item.get("top_logprobs") or ())):
                read = each.get("bytes")
                token = str(each.get("token", "")).encode() if read is None else bytes(read)
                raw[-1].append((token, each.get("logprob")))
    else:
        columns = (found.get("tokens") or (), found.get("token_logprobs") or (), found.get("top_logprobs") or ())
        for token, value, top in zip(*columns, strict=False):
            raw.append([(_legacy(each), logprob) for each, logprob in ((token, value), *(top or {}).items())])
    positions = []
    for (taken, own), *others in raw:
        entries: dict[bytes, float] = {}
        for token, value in others:
            if value is not None:  # two tokens may read the same
                entries[token] = entries.get(token, 0.0) + _probability(value)
        if taken not in entries and own is not None:
            entries[taken] = _probability(own)
        if len(entries) < 2:
            break
        positions.append(Position(taken, list(entries.items())))
    return positions


def _probability(logprob: float) -> float:
    """Raises `InvalidParameter` for a log-probability that is no number, or above 0; minus infinity is none at all."""
    if not logprob <= _ROUNDING:
        raise InvalidParameter("llm", "(not shown)", "log-probabilities that are numbers of at most 0")
    return math.exp(max(-1e4, min(0.0, logprob)))


def _legacy(token: str) -> bytes:
    """OpenAI writes half a character as ``bytes:\\xe2\\x80``."""
    if not token.startswith("bytes:"):
        return token.encode()
    parts = re.split(r"\\x([0-9a-f]{2})", token.removeprefix("bytes:"))
    return b"".join(bytes([int(part, 16)]) if i % 2 else part.encode() for i, part in enumerate(parts))
