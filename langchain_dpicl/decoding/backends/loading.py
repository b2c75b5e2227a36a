"""Weights and tokeniser for `TransformersLogits`.

Nothing is downloaded: a GGUF file (the embedded models' or another) or a folder that transformers wrote.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np

from langchain_dpicl.errors import LocalModelError
from langchain_dpicl.extras import require

_loading = threading.Lock()


def load(source: str | Path, dtype: str) -> tuple[Any, Any]:
    """The model and its tokeniser, from an embedded model's name, a GGUF file or a folder.

    One loading at a time, as it sets transformers to show no progress bars and no advice on standard error meanwhile.
    """
    from langchain_dpicl.local.weights import KNOWN_MODELS, model_path

    transformers: Any = require("transformers", "local")
    kind = getattr(require("torch", "local"), dtype)
    folder = Path(source).expanduser()
    path = None if folder.is_dir() and str(source) not in KNOWN_MODELS else model_path(source)
    try:
        logging: Any = importlib.import_module("transformers.utils.logging")
        reader: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
        with _loading, contextlib.ExitStack() as undo:
            undo.callback(setattr, reader, "tqdm", reader.tqdm)
            undo.callback(logging.set_verbosity, logging.get_verbosity())
            if logging.is_progress_bar_enabled():
                undo.callback(logging.enable_progress_bar)
            reader.tqdm = functools.partial(reader.tqdm, disable=True)
            logging.disable_progress_bar()
            logging.set_verbosity_error()
            if path is not None:
                return _from_gguf(path, kind)
            model = transformers.AutoModelForCausalLM.from_pretrained(str(folder), local_files_only=True, dtype=kind)
            return model, transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (ImportError, KeyError, OSError, RuntimeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
    raise LocalModelError(f"transformers cannot load {str(path or folder)!r} as a causal language model ({reason})")


def _from_gguf(path: Path, dtype: Any) -> tuple[Any, Any]:
    """Take the steps of ``from_pretrained(gguf_file=...)``, which needs accelerate and reads the header for 25 s.

    Parse the header once, without a memory map's slow slices: 3.5 s instead of 25 s for 262,144 tokens. transformers
    takes the reader from ``gguf`` at every call, once for the configuration and once for the tensors, and has no
    parameter for it. So replace the reader there meanwhile.
    """
    require("gguf", "local")
    import gguf
    import torch

    class QuickReader(gguf.GGUFReader):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value.view(np.ndarray) if name == "data" else value)

    library: Any = importlib.import_module("transformers")
    read: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils").load_gguf_checkpoint
    usual = gguf.GGUFReader
    gguf.GGUFReader = functools.cache(QuickReader)  # type: ignore[assignment, misc]
    try:
        config = library.AutoConfig.for_model(**read(str(path))["config"])
        with torch.device("meta"):  # names and shapes alone: nothing is allocated
            shape = library.AutoModelForCausalLM.from_config(config)
        weights = read(
            str(path),
            return_tensors=True,
            model_to_load=shape,
            torch_dtype=dtype,
        )["tensors"]
    finally:
        gguf.GGUFReader = usual  # type: ignore[misc]
    model = type(shape).from_pretrained(None, config=config, state_dict=weights, dtype=dtype)
    # The generic class reads all that it needs from the file; AutoTokenizer would parse it once more for a name.
    return model, library.PreTrainedTokenizerFast.from_pretrained(
        str(path.parent), gguf_file=path.name, local_files_only=True
    )


def pack(model: Any) -> None:
    """Lay the weights of linear layers out as oneDNN's kernels read them (float32 on a CPU; else nothing happens).

    Measured on two cores with Gemma 3 270M: 1.3 to 2 times as fast for a prompt, 4 times for the output layer. The
    layers' own weights are freed, except those that the embedding shares.
    """
    import torch

    mkldnn: Any = torch.backends.mkldnn
    if not mkldnn.is_available() or next(model.parameters()).device.type != "cpu":
        return
    ops: Any = torch.ops.mkldnn

    class PackedLinear(torch.nn.Module):
        def __init__(self, linear: torch.nn.Linear) -> None:
            super().__init__()
            self.weight = ops._reorder_linear_weight(linear.weight.detach())
            self.bias = linear.bias

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = ops._linear_pointwise(values, self.weight, self.bias, "none", [], "")
            return result

    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.Linear and child.weight.dtype == torch.float32:
                setattr(module, name, PackedLinear(child))


def fingerprint(model: Any) -> str:
    """A digest of the configuration and of numbers from every tensor of the weights (up to 4,096 of each)."""
    import torch

    config = {key: value for key, value in model.config.to_dict().items() if not key.startswith("_name_or_path")}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        values = tensor.detach().reshape(-1)
        some = values[:: max(1, values.numel() // 4096)].to("cpu", torch.float32).contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(some.numpy().tobytes())
    return digest.hexdigest()[:16]
