"""A loaded model of transformers: from tokens and a state to a vector, from vectors to scores.

See :mod:`langchain_dpicl.decoding.backends.transformers_model` for the numbers that a row depends on.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from langchain_dpicl.decoding.backends.loading import fingerprint, pack
from langchain_dpicl.decoding.model import Logits
from langchain_dpicl.errors import InvalidParameter

_BLOCK = 8  # rows of the output layer that are computed together


class Network:
    """A model in evaluation mode and its tokeniser. ``packed`` lays its weights out anew, which alters the model."""

    def __init__(self, model: Any, tokenizer: Any, threads: int | None, *, packed: bool = False) -> None:
        if not callable(getattr(model, "get_output_embeddings", None)) or not hasattr(model, "config"):
            raise InvalidParameter("model", type(model).__name__, "a causal language model of transformers")
        self.model, self.tokenizer, self._threads = model.eval(), tokenizer, threads
        self.name = f"transformers:{model.config.model_type}:{fingerprint(model)}"
        if packed:
            pack(model)
        self._busy = threading.Lock()
        self._embedded: int | None = getattr(model.get_input_embeddings(), "num_embeddings", None)
        ends: set[int] = set()
        for source in (getattr(model, "generation_config", None), model.config.get_text_config(), tokenizer):
            ids = getattr(source, "eos_token_id", None)
            ends.update([ids] if isinstance(ids, int) else ids or [])
        self.end_tokens = frozenset(ends)
        self.context: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        start, made = tokenizer.bos_token_id, tokenizer("a")["input_ids"]
        self.first = [start] if start is not None and made[:1] == [start] else []
        self._body: Any = None
        self._head: Any = None  # without one, the model is used whole and its vectors are scores
        self._block = 1
        with self.working():
            self.vocabulary = self._take_apart()

    def tokens(self, text: str) -> list[int]:
        """The tokens of a piece of a prompt, with nothing put in front."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """One step at a time, without gradients, with the chosen number of threads."""
        import torch

        with self._busy, torch.inference_mode():
            before = torch.get_num_threads()
            if self._threads is not None:
                torch.set_num_threads(self._threads)
            try:
                yield
            finally:
                if self._threads is not None:
                    torch.set_num_threads(before)

    def read(self, tokens: list[int], cache: Any) -> tuple[Any, Any]:
        """The vector after these tokens, and the state then. ``cache`` itself is left as it was.

        Raises `ValueError` for a token without an embedding, before an accelerator sees it: after such an error an
        accelerator answers no caller any more.
        """
        import torch

        if self._embedded is not None and max(tokens, default=0) >= self._embedded:
            raise ValueError("a token that the model does not know")
        ids = torch.tensor([tokens], device=self.model.device)
        if cache is None:
            state = _empty(self.model)
        else:  # layers replace their tensors when they grow and never write into them
            state = copy.copy(cache)
            state.layers = [copy.copy(layer) for layer in cache.layers]
        if self._head is None:
            out = self.model(input_ids=ids, past_key_values=state, use_cache=True, logits_to_keep=1)
            return out.logits[0, -1].clone(), state
        out = self._body(input_ids=ids, past_key_values=state, use_cache=True)
        return out.last_hidden_state[0, -1].clone(), state

    def scores(self, vectors: Sequence[Any]) -> Logits:
        """One row of scores for each vector, in blocks of constant shape; NaN for None. The first is never None."""
        import torch

        nothing = torch.zeros_like(vectors[0])
        rows = torch.stack([nothing if vector is None else vector for vector in vectors])
        if self._head is not None:
            blocks = []
            for start in range(0, len(rows), self._block):
                some = rows[start : start + self._block]
                block = rows.new_zeros((self._block, rows.shape[1]))
                block[: len(some)] = some
                blocks.append(self._head(block)[: len(some)])
            rows = torch.cat(blocks)
        result: Logits = np.ascontiguousarray(rows.to("cpu", torch.float32).numpy())
        result[[vector is None for vector in vectors]] = np.nan
        return result

    def _take_apart(self) -> int:
        """Separate the output layer if the model only applies it; return the number of scores.

        A probe of public tokens, read at once and in two pieces, decides that the model can be used at all.
        """
        import torch

        size = self.model.config.get_text_config().vocab_size
        words = self.tokens("Colour: red, thing: cherry")  # a text as models know it: others they read less exactly
        probe = [token % size for token in (words if len(words) >= 6 else range(1, 7))]
        state = _empty(self.model)
        try:
            ids = torch.tensor([probe], device=self.model.device)
            whole = self.model(input_ids=ids, past_key_values=state, use_cache=True).logits[:, -1]
        except (AttributeError, RuntimeError, TypeError, ValueError):
            whole = None
        if whole is None or whole.ndim != 2:
            raise InvalidParameter("model", type(self.model).__name__, "a model with next-token logits and a state")

        rounding = 1e-2 if self.model.dtype == torch.float32 else 1.0

        def agrees(scores: Any) -> bool:
            return scores.shape == whole.shape and torch.allclose(scores, whole, rtol=1e-2, atol=rounding)

        body, head = self.model.base_model, self.model.get_output_embeddings()
        if head is not None and body is not self.model:
            vector = body(input_ids=ids, use_cache=False).last_hidden_state[:, -1]
            if agrees(head(vector)):
                self._body, self._head = body, head
                self._block = _BLOCK if self._rowwise(vector) else 1
        _, cache = self.read(probe[:3], None)
        if not agrees(torch.from_numpy(self.scores([self.read(probe[3:], cache)[0]])).to(whole)):
            raise InvalidParameter("model", type(self.model).__name__, "a model that reads a text in pieces as at once")
        return int(whole.shape[-1])

    def _rowwise(self, vector: Any) -> bool:
        """Whether a row of a block of the output layer stays the same, bit by bit, at another place beside others."""
        import torch

        places = torch.arange(_BLOCK * vector.shape[1], device=vector.device).reshape(_BLOCK, -1)
        rows = torch.sin(places.float() ** 1.5).to(vector.dtype)  # public numbers without a pattern
        expected = self._head(rows)
        for row in range(_BLOCK):
            there = (3 * row + 1) % _BLOCK
            block = torch.cos(places.float() * (row + 1)).to(vector.dtype)
            block[there] = rows[row]
            if not torch.equal(self._head(block)[there], expected[row]):
                return False
        return True


def _empty(model: Any) -> Any:
    """A state that has read nothing: keys and values of every layer, which is all that may be remembered."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    cache = DynamicCache(config=model.config)
    if any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers):
        raise InvalidParameter("model", type(model).__name__, "a model that remembers keys and values alone")
    return cache


def compact(vector: Any, cache: Any) -> int:
    """Drop what a state does not need (a sliding window is a view of the whole); return the bytes that remain."""
    size = int(vector.nbytes)
    for layer in cache.layers:
        if layer.is_initialized:
            layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
            size += int(layer.keys.nbytes + layer.values.nbytes)
    return size
