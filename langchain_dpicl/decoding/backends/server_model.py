"""A :class:`~langchain_dpicl.decoding.model.LogitsModel` on an OpenAI-compatible server that shows every token's
log-probability.

The guarantee assumes a draw from the whole distribution. So a server must return the log-probability of EVERY token,
not of the likeliest few: llama.cpp's server (and :func:`langchain_dpicl.local.local_llm`'s) as it is, or vLLM started
with ``--max-logprobs -1`` (and ``--logprobs-mode raw_logprobs``, its default). Prompts are sent as token ids, so the
server must answer ``/tokenize`` and ``/detokenize``.

Each step reads whole prompts, one at a time. A row of 262,144 log-probabilities is 26 MB of JSON: two to four seconds
on two cores. Use this backend for checks, and with small vocabularies or fast links.

A row depends on its own prompt alone, as far as the server keeps requests apart. The requests ask it not to reuse what
it cached for others. A server that computes requests of several clients in one batch may move the last digits of a
row; give the sampler a server of its own.

A demonstration that the server refuses, or answers without all tokens, adds nothing to the token. The public prompt is
then asked again, and fails the answer if the server is down: otherwise all later rows would fail because of one. So a
demonstration that stops the server, or keeps it busy beyond ``timeout``, does fail the answer.
"""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from langchain_dpicl.decoding.model import Demonstration, Logits, NotCopied, attempt
from langchain_dpicl.errors import InvalidParameter, ModelUnavailable, UnsafeConfigurationError
from langchain_dpicl.privacy.checks import whole

_EVERY_TOKEN = "a server that returns every token's id and log-probability (llama.cpp; vLLM with --max-logprobs -1)"


class ServerLogits(NotCopied):
    """Next-token log-probabilities from a completion server.

    Parameters
    ----------
    base_url
        The address that OpenAI's clients take, which ends in ``/v1``.
    model
        The model's name on the server. Public: with the vocabulary's size it names this model.
    end_tokens
        The texts of the tokens that end an answer, such as ``"<eos>"``. Each must be one token.
    api_key
        Sent as a bearer token.
    vocabulary, context
        The number of tokens, and how many a prompt and an answer may have together. Default: the server's own numbers
        (llama.cpp reports both, vLLM the context).
    timeout
        Seconds that a request may take.

    Nothing is kept between answers here. The server may keep prompts.

    Raises
    ------
    InvalidParameter
        A parameter outside its bounds, or a server that does not show the whole distribution: public questions of the
        constructor find a token missing, or probabilities that do not add up to 1.
    ModelUnavailable
        A server that does not answer, or not as a completion server does. Names no prompt.
    UnsafeConfigurationError
        A server whose log-probabilities for a prompt depend on other prompts.
    """

    end_tokens: frozenset[int] = frozenset()

    def __init__(
        self,
        base_url: str,
        model: str,
        end_tokens: Sequence[str],
        *,
        api_key: str = "none",
        vocabulary: int | None = None,
        context: int | None = None,
        timeout: float = 600.0,
    ) -> None:
        if not isinstance(base_url, str) or not base_url.startswith(("http://", "https://")):
            raise InvalidParameter("base_url", base_url, "an http or https address")
        if not isinstance(model, str) or not model:
            raise InvalidParameter("model", model, "a name")
        for name, value in (("vocabulary", vocabulary), ("context", context)):
            if value is not None:
                whole(name, value)
        self._api = base_url.rstrip("/")
        self._root = self._api.removesuffix("/v1")
        self._model, self._key, self._timeout = model, api_key, timeout
        self._busy = threading.Lock()
        listed = self._request("GET", f"{self._api}/models").get("data")
        models = [each for each in listed if isinstance(each, Mapping)] if isinstance(listed, list) else []
        chosen = next((each for each in models if each.get("id") == model), models[0] if models else {})
        meta = chosen.get("meta")
        facts = {**chosen, **(meta if isinstance(meta, Mapping) else {})}
        said = {key: value for key, value in facts.items() if isinstance(value, int)}
        self.vocabulary = vocabulary or said.get("n_vocab", 0)
        self._context = context or said.get("n_ctx") or said.get("max_model_len", 0)
        for name, size in (("vocabulary", self.vocabulary), ("context", self._context)):
            if not size:
                raise InvalidParameter(name, None, "a number, as this server does not say it")
        self.name = f"server:{model}:{self.vocabulary}"
        plain = self.tokens("a")
        with_first = self.tokens("a", special=True)
        self.first = with_first[: -len(plain)] if with_first[-len(plain) :] == plain else []
        for text in end_tokens:
            if len(tokens := self.tokens(text)) != 1:
                raise InvalidParameter("end_tokens", text, f"texts of one token each; this one has {len(tokens)}")
            self.end_tokens |= {*tokens}
        # Public questions: is every token there, do they add up, and does a prompt's answer stay the same?
        prompt = self.tokens("The weather is")
        row = self.row(prompt)
        total = math.fsum(np.exp(np.minimum(row.astype(np.float64), 1.0)))
        if not 0.99 < total < 1.01:
            raise InvalidParameter("base_url", self._api, f"{_EVERY_TOKEN}: these add up to {total:.3f} instead of 1")
        self.row([*prompt, *self.tokens(" fine today, and")])
        if not np.array_equal(self.row(prompt), row):
            raise UnsafeConfigurationError(
                "this server's log-probabilities for a prompt depend on earlier requests: turn its prompt "
                "cache off and let it compute one request at a time"
            )

    def fits(self, demonstration: str, shared: str, tokens: int) -> bool:
        """Return whether a prompt with so many tokens of answer stays within the server's context."""
        used = len(self.first) + len(self.tokens(demonstration)) + len(self.tokens(shared)) + tokens
        return used <= self._context

    def text(self, tokens: Sequence[int]) -> str:
        """The text of some tokens, without the end tokens."""
        kept = [int(token) for token in tokens if token not in self.end_tokens]
        if not kept:
            return ""
        answer = self._request("POST", f"{self._root}/detokenize", {"model": self._model, "tokens": kept})
        text = answer.get("content", answer.get("prompt"))
        if not isinstance(text, str):
            raise ModelUnavailable("the server's /detokenize returns no text")
        return text

    def session(
        self,
        shared: str,
        demonstrations: Sequence[Demonstration],
        *,
        steps: int,
    ) -> _ServerSession:
        """Open an answer: the demonstrations are tokenised when a step first needs them."""
        if not self.fits("", shared, steps):
            raise InvalidParameter("steps", steps, f"with the shared text at most {self._context} tokens of context")
        return _ServerSession(self, self.tokens(shared), demonstrations)

    def forget(self, keys: Iterable[Hashable]) -> None:
        """Nothing is kept."""

    def tokens(self, text: str, *, special: bool = False) -> list[int]:
        """The tokens of a piece of a prompt, by the server's own tokeniser; ``special``: with what it puts in front."""
        if not text:
            return []
        llama = {"content": text, "add_special": special, "parse_special": True}
        vllm = {"model": self._model, "prompt": text, "add_special_tokens": special}
        tokens = self._request("POST", f"{self._root}/tokenize", {**llama, **vllm}).get("tokens")
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise ModelUnavailable("the server's /tokenize returns no token ids")
        return tokens

    def row(self, prompt: Sequence[int]) -> Logits:
        """The log-probability of every token after the tokeniser's first ones and a prompt."""
        request = {
            "model": self._model,
            "prompt": [*self.first, *map(int, prompt)],
            "max_tokens": 1,
            "temperature": 1.0,
            "logprobs": self.vocabulary,
            "return_tokens_as_token_ids": True,  # vLLM: ids instead of texts
            "cache_prompt": False,  # llama.cpp: read the prompt anew
            "cache_salt": secrets.token_urlsafe(16),  # vLLM: share no prefix with another request
        }
        with self._busy:
            answer = self._request("POST", f"{self._api}/completions", request)
        row = np.full(self.vocabulary, np.nan, np.float32)
        for token, value in _pairs(answer):
            if 0 <= token < len(row):
                row[token] = value
        if np.isnan(row).any():
            raise InvalidParameter("base_url", self._api, _EVERY_TOKEN)
        return row

    def _request(self, method: str, url: str, request: dict[str, Any] | None = None) -> dict[str, Any]:
        """The answer's object. Errors name the address and the status: an error's body may repeat the prompt."""
        import httpx

        status: Any = "no answer"
        try:
            with httpx.Client(trust_env=False, timeout=self._timeout) as client:  # no proxy sees a prompt
                answer = client.request(
                    method,
                    url,
                    json=request,
                    headers={"Authorization": f"Bearer {self._key}"},
                )
            status = answer.status_code
            if answer.is_success and isinstance(made := answer.json(), dict):
                return made
        except (httpx.HTTPError, httpx.InvalidURL, ValueError):
            pass
        raise ModelUnavailable(f"{method} {url} failed ({status})")

    def __repr__(self) -> str:
        return f"ServerLogits({self._api!r}, {self._model!r})"


class _ServerSession(NotCopied):
    """One answer. Holds the tokens of its demonstrations until it is closed."""

    def __init__(
        self,
        server: ServerLogits,
        shared: list[int],
        demonstrations: Sequence[Demonstration],
    ) -> None:
        self._server = server
        self._shared = shared
        self._demonstrations = tuple(demonstrations)
        self._tokens: dict[int, list[int]] = {}

    def logits(self, rows: Sequence[int], released: Sequence[int]) -> Logits:
        """See :class:`~langchain_dpicl.decoding.model.LogitsSession`."""

        def one_shot(row: int) -> Logits:
            if row not in self._tokens:
                self._tokens[row] = self._server.tokens(self._demonstrations[row].text)
            return self._server.row([*self._tokens[row], *rest])

        rest = [*self._shared, *released]
        zero_shot = self._server.row(rest)
        found = [zero_shot]
        for row in rows:
            one = attempt(one_shot, row)
            if one is None:
                self._server.row(rest)  # raises if the server is down or still busy
                one = np.full_like(zero_shot, np.nan)
            found.append(one)
        return np.stack(found)

    def close(self) -> None:
        """Drop the demonstrations."""
        self._demonstrations, self._tokens = (), {}


def _pairs(answer: Mapping[str, Any]) -> Iterable[tuple[int, float]]:
    """(token, log-probability) of the first position, in llama.cpp's shape or in vLLM's; no pair for any other shape.

    JSON has no infinities: a token that cannot come is null, or very unlikely.
    """
    try:
        found = answer["choices"][0]["logprobs"]
        if found.get("content"):
            pairs = [(int(each["id"]), each["logprob"]) for each in found["content"][0]["top_logprobs"]]
        else:
            top = found["top_logprobs"][0]
            pairs = [(int(key.removeprefix("token_id:")), value) for key, value in top.items()]
        return [(token, -1e4 if value is None else max(float(value), -1e4)) for token, value in pairs]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return []
