"""A :class:`~langchain_dpicl.decoding.model.LogitsModel` on any causal language model of transformers, in process.

*An owner's row depends on that owner's demonstration and on public text alone, to the last bit*, for one machine, one
version of torch and one number of threads. Floating-point sums depend on how a product is laid out: with two threads, a
row of a batch of five changes with its place in the batch (measured, torch 2.13 on a CPU). Therefore:

- Every row is read alone, always in the same two pieces: the demonstration (with the tokeniser's first token), then
  the shared text with the released tokens. A state has the same numbers whenever it is made. On a CPU this costs
  little: a piece of fifty tokens keeps the cores as busy as a batch.
- The output layer, which is slow for single rows, gets blocks of eight rows, padded with zeros. A test at loading shows
  whether a row of such a block depends, bit by bit, on its place or on the other rows; if so, the blocks have one row.

Speed comes from the kept states (a demonstration is read once, for all queries and tokens), the zero-shot state that
grows by one token at a time, the output layer at the last position only, and packed weights (`loading.pack`).
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from langchain_dpicl.decoding.backends.loading import fingerprint, load, pack
from langchain_dpicl.decoding.model import Demonstration, Logits, NotCopied, attempt
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.privacy.checks import whole

_BLOCK = 8  # rows of the output layer that are computed together


class TransformersLogits(NotCopied):
    """Next-token logits of a causal language model that runs in this process, on the CPU or wherever the model is.

    Parameters
    ----------
    model
        An embedded model's name (:data:`langchain_dpicl.local.KNOWN_MODELS`), the path of a GGUF file, a folder
        written by ``save_pretrained``, or a pair (model, tokeniser) of transformers, which is put in evaluation mode
        and not changed otherwise. The first three are loaded at first use, without network.
    memory_bytes
        The most bytes of key and value states of demonstrations that are kept between answers.
    threads
        Threads of computation while a row is read; default: torch's own setting.
    dtype
        Of the weights that are loaded. A pair keeps its own.

    Demonstration, shared text and answer are each tokenised on their own, so that what was read stays valid: choose a
    template whose pieces end at the end of a token (a line break does).

    Raises
    ------
    InvalidParameter
        A parameter outside its bounds; a model that is not a causal one, or whose memory is not keys and values.
    LocalModelError
        At first use: weights or packages absent, altered or unreadable.
    """

    def __init__(
        self,
        model: str | Path | tuple[Any, Any] = "gemma3-270m",
        *,
        memory_bytes: int = 1 << 30,
        threads: int | None = None,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    ) -> None:
        if not isinstance(model, (str, Path)) and not (isinstance(model, tuple) and len(model) == 2):
            raise InvalidParameter("model", type(model).__name__, "a name, a path or a pair (model, tokeniser)")
        if dtype not in ("float32", "bfloat16", "float16"):
            raise InvalidParameter("dtype", dtype, "float32, bfloat16 or float16")
        self.states = StateCache(memory_bytes)
        self._source, self._dtype = model, dtype
        self._threads = None if threads is None else whole("threads", threads)
        self._network: Network | None = None
        self._loading = threading.Lock()

    @property
    def _loaded(self) -> Network:
        with self._loading:
            if self._network is None:
                source = self._source
                pair = source if isinstance(source, tuple) else load(source, self._dtype)
                self._network = Network(*pair, self._threads, packed=pair is not source)
            return self._network

    @property
    def name(self) -> str:
        """The kind of model and a fingerprint of its configuration and weights."""
        return self._loaded.name

    @property
    def vocabulary(self) -> int:
        """The width of the model's output, which may exceed the number of tokens that the tokeniser knows."""
        return self._loaded.vocabulary

    @property
    def end_tokens(self) -> frozenset[int]:
        """The end-of-text tokens of the model's generation settings, its configuration or its tokeniser."""
        return self._loaded.end_tokens

    def fits(self, demonstration: str, shared: str, tokens: int) -> bool:
        """Return whether a prompt with so many tokens of answer stays within the positions that the model knows."""
        network = self._loaded
        used = len(network.first) + len(network.tokens(demonstration)) + len(network.tokens(shared)) + tokens
        return network.context is None or used <= network.context

    def text(self, tokens: Sequence[int]) -> str:
        """The text of some tokens, without the end tokens."""
        kept = [int(token) for token in tokens if token not in self.end_tokens]
        return str(self._loaded.tokenizer.decode(kept, clean_up_tokenization_spaces=False))

    def session(self, shared: str, demonstrations: Sequence[Demonstration], *, steps: int) -> _Session:
        """Open an answer. Reads nothing yet: a demonstration is read when a step first needs it.

        Raises `InvalidParameter` if shared text and steps do not fit the context, or there is no first token.
        """
        network = self._loaded
        tokens = network.tokens(shared)
        if not self.fits("", shared, steps):
            raise InvalidParameter("steps", steps, f"with the shared text at most {network.context} tokens of context")
        if not network.first and not tokens:
            raise InvalidParameter("shared", shared, "a text of at least one token")
        return _Session(network, self.states, tokens, demonstrations)

    def forget(self, keys: Iterable[Hashable]) -> None:
        """Drop the states of these demonstrations. An open answer keeps none of its own."""
        self.states.forget(keys)

    def __repr__(self) -> str:
        source = "(model, tokeniser)" if isinstance(self._source, tuple) else repr(str(self._source))
        return f"TransformersLogits({source}, memory_bytes={self.states.memory_bytes})"


class StateCache(NotCopied):
    """Private states by demonstration (key and text), for any thread: the last used, up to ``memory_bytes`` in all."""

    def __init__(self, memory_bytes: int) -> None:
        self.memory_bytes = whole("memory_bytes", memory_bytes, at_least=0)
        self.bytes = 0
        self._entries: OrderedDict[Demonstration, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, demonstration: Demonstration) -> Any:
        """The state, or None."""
        with self._lock:
            if demonstration not in self._entries:
                return None
            self._entries.move_to_end(demonstration)
            return self._entries[demonstration][0]

    def put(self, demonstration: Demonstration, state: Any, size: int) -> None:
        """Keep a state of so many bytes, if that is within the bound; the least recently used ones make room."""
        with self._lock:
            self._drop(demonstration)
            if size > self.memory_bytes:
                return
            self._entries[demonstration] = (state, size)
            self.bytes += size
            while self.bytes > self.memory_bytes:
                self._drop(next(iter(self._entries)))

    def forget(self, keys: Iterable[Hashable]) -> None:
        """Drop every state of these keys, whatever their text was."""
        gone = set(keys)
        with self._lock:
            for demonstration in [each for each in self._entries if each.key in gone]:
                self._drop(demonstration)

    def _drop(self, demonstration: Demonstration) -> None:
        self.bytes -= self._entries.pop(demonstration, (None, 0))[1]

    def __len__(self) -> int:
        return len(self._entries)


class _Session(NotCopied):
    """One answer. Holds the zero-shot state; the states of demonstrations are in the shared cache."""

    def __init__(
        self,
        network: Network,
        states: StateCache,
        shared: list[int],
        demonstrations: Sequence[Demonstration],
    ) -> None:
        self._network = network
        self._states = states
        self._shared = shared
        self._demonstrations = tuple(demonstrations)
        self._read: list[int] = []  # the tokens in the zero-shot state
        self._zero_shot: tuple[Any, Any] = (None, None)  # its last vector and its cache

    def logits(self, rows: Sequence[int], released: Sequence[int]) -> Logits:
        """See :class:`~langchain_dpicl.decoding.model.LogitsSession`."""
        rest = [*self._shared, *(int(token) for token in released)]
        with self._network.working():
            prompt = [*self._network.first, *rest]
            if prompt[: len(self._read)] != self._read:
                raise InvalidParameter("released", len(released), "the tokens of the call before, and perhaps more")
            if len(prompt) > len(self._read):  # only the new tokens are read
                self._zero_shot = self._network.read(prompt[len(self._read) :], self._zero_shot[1])
                self._read = prompt
            return self._network.scores([self._zero_shot[0], *(attempt(self._row, row, rest) for row in rows)])

    def _row(self, row: int, rest: list[int]) -> Any:
        """A demonstration's last vector: always from its own state, in one piece, whatever was read before."""
        demonstration = self._demonstrations[row]
        state = self._states.get(demonstration)
        if state is None:
            tokens = [*self._network.first, *self._network.tokens(demonstration.text)]
            state = (None, None)
            if tokens:
                state = self._network.read(tokens, None)
                kept = [layer for layer in state[1].layers if layer.is_initialized]
                for layer in kept:  # a sliding window is a view of the whole
                    layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
                size = state[0].nbytes + sum(layer.keys.nbytes + layer.values.nbytes for layer in kept)
                self._states.put(demonstration, state, size)
        vector, cache = state
        return self._network.read(rest, cache)[0] if rest else vector

    def close(self) -> None:
        """Drop the answer's own state and its demonstrations."""
        self._demonstrations, self._zero_shot = (), (None, None)


class Network:
    """A loaded model, and its tokeniser. ``packed`` lays its weights out anew, which alters the model."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        threads: int | None,
        *,
        packed: bool = False,
    ) -> None:
        if not callable(getattr(model, "get_output_embeddings", None)) or not hasattr(model, "config"):
            raise InvalidParameter("model", type(model).__name__, "a causal language model of transformers")
        self.model, self.tokenizer, self._threads = model.eval(), tokenizer, threads
        self.name = f"transformers:{model.config.model_type}:{fingerprint(model)}"
        if packed:
            pack(model)
        self._busy = threading.Lock()
        self._embedded: int | None = getattr(model.get_input_embeddings(), "num_embeddings", None)
        config = model.config.get_text_config()
        ends: set[int] = set()
        for source in (getattr(model, "generation_config", None), config, tokenizer):
            ids = getattr(source, "eos_token_id", None)
            ends.update([ids] if isinstance(ids, int) else ids or [])
        self.end_tokens = frozenset(ends)
        self.context: int | None = getattr(config, "max_position_embeddings", None)
        start = tokenizer.bos_token_id
        made = tokenizer("a")["input_ids"]
        self.first = [start] if start is not None and made[:1] == [start] else []
        self._body: Any = None
        self._head: Any = None  # without one, the model is used whole and its vectors are scores
        self._block = 1
        with self.working():
            self.vocabulary = self._take_apart(config.vocab_size)

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

        Raises `ValueError` for a token without an embedding: an accelerator that sees one answers no caller any more.
        """
        import torch

        if self._embedded is not None and max(tokens, default=0) >= self._embedded:
            raise ValueError("a token that the model does not know")
        ids = torch.tensor([tokens], device=self.model.device)
        if cache is None:
            state = self._empty()
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
            filled = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % self._block))
            # Each block is a tensor of its own: a kernel's last digits may depend on where in memory its rows begin.
            blocks = [block.clone() for block in torch.split(filled, self._block)]
            rows = torch.cat([self._head(block) for block in blocks])[: len(rows)]
        result: Logits = np.ascontiguousarray(rows.to("cpu", torch.float32).numpy())
        result[[vector is None for vector in vectors]] = np.nan
        return result

    def _empty(self) -> Any:
        """A state that has read nothing: keys and values of every layer, which is all that may be remembered."""
        from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

        cache = DynamicCache(config=self.model.config)
        if any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers):
            raise InvalidParameter("model", type(self.model).__name__, "a model that remembers keys and values alone")
        return cache

    def _take_apart(self, size: int) -> int:
        """Separate the output layer if the model only applies it; return the number of scores.

        A probe of public tokens (of ``size`` known ones), read at once and in two pieces, shows if the model is usable.
        """
        import torch

        words = self.tokens("Colour: red, thing: cherry")  # a text as models know it: others they read less exactly
        probe = [token % size for token in (words if len(words) >= 6 else range(1, 7))]
        state = self._empty()
        try:
            ids = torch.tensor([probe], device=self.model.device)
            whole = self.model(input_ids=ids, past_key_values=state, use_cache=True).logits[:, -1]
        except (AttributeError, RuntimeError, TypeError, ValueError):
            whole = None
        if whole is None or whole.ndim != 2:
            raise InvalidParameter("model", type(self.model).__name__, "a model with next-token logits and a state")
        rounding = 1e-2 if self.model.dtype == torch.float32 else 1.0

        def agrees(scores: Any) -> bool:
            return scores.shape == whole.shape and torch.allclose(
                scores,
                whole,
                rtol=1e-2,
                atol=rounding,
            )

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
        """Return whether a row of a block of the output layer stays the same, bit by bit, at other places."""
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
