"""A :class:`~langchain_dpicl.decoding.model.LogitsModel` on any causal language model of transformers, in process.

What a row depends on
---------------------
*An owner's row depends on that owner's demonstration and on public text alone, to the last bit.* Floating-point sums
depend on how a product is laid out: with two threads, a row of a batch of five rows changes with its place in the batch
(measured, torch 2.13 on a CPU), so one owner's presence would show in the last digits of another's row. Therefore:

- Every row is read alone, always in the same two pieces: the demonstration (with the tokeniser's first token), then
  the shared text with the released tokens. A state that was kept, one that was dropped and made again, and one that
  another answer made are the same numbers. On a CPU this costs little: a piece of fifty tokens keeps the cores as busy
  as a batch.
- The output layer, which is slow for single rows, gets blocks of constant shape: eight rows, padded with zeros. When
  the model is loaded, a test shows whether a row of such a block depends on its place or on the other rows, bit by
  bit; if it does, the blocks have one row.
- A row that cannot be read leaves zeros at its place in a block, and is NaN in the end.

This holds for one machine, one version of torch and one number of threads.

Speed comes from the kept states (a demonstration is read once, for all queries and tokens), the zero-shot state that
grows by one token at a time, the output layer at the last position only, and packed weights
(:func:`langchain_dpicl.decoding.backends.loading.pack`).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from langchain_dpicl.decoding.backends.loading import load
from langchain_dpicl.decoding.backends.network import Network, compact
from langchain_dpicl.decoding.model import Demonstration, Logits, NotCopied
from langchain_dpicl.decoding.rows import attempt
from langchain_dpicl.errors import InvalidParameter

__all__ = ["TransformersLogits"]


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
        if threads is not None and (not isinstance(threads, int) or isinstance(threads, bool) or threads < 1):
            raise InvalidParameter("threads", threads, "a whole number, at least 1, or None")
        if dtype not in ("float32", "bfloat16", "float16"):
            raise InvalidParameter("dtype", dtype, "float32, bfloat16 or float16")
        self.states = StateCache(memory_bytes)
        self._source, self._threads, self._dtype = model, threads, dtype
        self._network: Network | None = None
        self._loading = threading.Lock()

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
        """Whether a prompt with so many tokens of answer stays within the positions that the model was made for."""
        network = self._loaded
        used = len(network.first) + len(network.tokens(demonstration)) + len(network.tokens(shared)) + tokens
        return network.context is None or used <= network.context

    def text(self, tokens: Sequence[int]) -> str:
        """The text of some tokens, without the end tokens."""
        network = self._loaded
        kept = [int(token) for token in tokens if token not in network.end_tokens]
        decoded: str = network.tokenizer.decode(kept, clean_up_tokenization_spaces=False)
        return decoded

    def session(self, shared: str, demonstrations: Sequence[Demonstration], *, steps: int) -> _Session:
        """Open an answer. Reads nothing yet: a demonstration is read when a step first needs it.

        Raises `InvalidParameter` if shared text and steps do not fit the context, or there is no first token.
        """
        network = self._loaded
        if not self.fits("", shared, steps):
            raise InvalidParameter("steps", steps, f"with the shared text at most {network.context} tokens of context")
        if not network.first and not network.tokens(shared):
            raise InvalidParameter("shared", shared, "a text of at least one token")
        return _Session(network, self.states, network.tokens(shared), demonstrations)

    def forget(self, keys: Iterable[Hashable]) -> None:
        """Drop the states of these demonstrations. An open answer keeps none of its own."""
        self.states.forget(keys)

    @property
    def _loaded(self) -> Network:
        with self._loading:
            if self._network is None:
                if isinstance(self._source, tuple):
                    self._network = Network(*self._source, self._threads)
                else:
                    self._network = Network(*load(self._source, self._dtype), self._threads, packed=True)
            return self._network

    def __repr__(self) -> str:
        source = "(model, tokeniser)" if isinstance(self._source, tuple) else repr(str(self._source))
        return f"TransformersLogits({source}, memory_bytes={self.states.memory_bytes})"


class StateCache(NotCopied):
    """Private states by demonstration: the last used ones, up to ``memory_bytes`` in all. Threads may share it.

    A state that is larger than the bound is not kept. A demonstration with another text under the same key is another
    one. States leave with their exemplar (`forget`).
    """

    def __init__(self, memory_bytes: int) -> None:
        if not isinstance(memory_bytes, int) or isinstance(memory_bytes, bool) or memory_bytes < 0:
            raise InvalidParameter("memory_bytes", memory_bytes, "a whole number, at least 0")
        self.memory_bytes = memory_bytes
        self._entries: OrderedDict[tuple[Hashable, str], tuple[Any, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, demonstration: Demonstration) -> Any:
        """The state, or None."""
        place = (demonstration.key, demonstration.text)
        with self._lock:
            if place not in self._entries:
                return None
            self._entries.move_to_end(place)
            return self._entries[place][0]

    def put(self, demonstration: Demonstration, state: Any, size: int) -> None:
        """Keep a state of so many bytes; the least recently used ones make room."""
        place = (demonstration.key, demonstration.text)
        with self._lock:
            self._drop(place)
            if size > self.memory_bytes:
                return
            self._entries[place] = (state, size)
            self._bytes += size
            while self._bytes > self.memory_bytes:
                self._drop(next(iter(self._entries)))

    def forget(self, keys: Iterable[Hashable]) -> None:
        """Drop every state of these keys, whatever their text was."""
        gone = set(keys)
        with self._lock:
            for place in [place for place in self._entries if place[0] in gone]:
                self._drop(place)

    def _drop(self, place: tuple[Hashable, str]) -> None:
        self._bytes -= self._entries.pop(place, (None, 0))[1]

    @property
    def bytes(self) -> int:
        """The size of the states at present."""
        with self._lock:
            return self._bytes

    @property
    def per_demonstration(self) -> float:
        """Bytes of a state on average; 0 if there is none."""
        with self._lock:
            return self._bytes / max(1, len(self._entries))

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    def __repr__(self) -> str:
        return f"StateCache(memory_bytes={self.memory_bytes})"


class _Session(NotCopied):
    """One answer. Holds the zero-shot state; the states of demonstrations are in the shared cache."""

    def __init__(
        self, network: Network, states: StateCache, shared: list[int], demonstrations: Sequence[Demonstration]
    ) -> None:
        self._network, self._states = network, states
        self._shared, self._demonstrations = shared, tuple(demonstrations)
        self._read: list[int] = []  # the tokens in the zero-shot state
        self._zero_shot: tuple[Any, Any] = (None, None)  # its last vector and its cache

    def logits(self, rows: Sequence[int], released: Sequence[int]) -> Logits:
        """See :class:`~langchain_dpicl.decoding.model.LogitsSession`."""
        rest = [*self._shared, *(int(token) for token in released)]
        with self._network.working():
            whole = [*self._network.first, *rest]
            if whole[: len(self._read)] != self._read:
                raise InvalidParameter("released", len(released), "the tokens of the call before, and perhaps more")
            if len(whole) > len(self._read):  # only the new tokens are read
                self._zero_shot = self._network.read(whole[len(self._read) :], self._zero_shot[1])
                self._read = whole
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
                self._states.put(demonstration, state, compact(*state))
        vector, cache = state
        return self._network.read(rest, cache)[0] if rest else vector

    def close(self) -> None:
        """Drop the answer's own state and its demonstrations."""
        self._demonstrations, self._zero_shot = (), (None, None)

    def __repr__(self) -> str:
        return "<session of private demonstrations>"
