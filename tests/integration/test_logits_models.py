"""The two backends that show next-token logits, on the same weights: a tiny random model in a GGUF file (exact), and
the embedded ones (quantised, which llama.cpp computes with and transformers unpacks)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from langchain_dpicl.decoding.answer import PrivateAnswer, Settings
from langchain_dpicl.decoding.backends.server_model import ServerLogits
from langchain_dpicl.decoding.backends.transformers_model import TransformersLogits
from langchain_dpicl.decoding.exemplars import Draw
from langchain_dpicl.decoding.model import Demonstration
from langchain_dpicl.local import local_llm
from langchain_dpicl.privacy.noise import SecureRandomness

gguf = pytest.importorskip("gguf")
pytest.importorskip("transformers")
pytest.importorskip("xllamacpp")

SHOWN = "name[The Wrestlers], eatType[coffee shop], area[riverside]\nThe Wrestlers is a coffee shop by the river.\n\n"
ASKED = "name[Blue Spice], eatType[pub], area[city centre]\n"


def server_of(model: str | Path, end: str, **settings: Any) -> ServerLogits:
    """The embedded llama.cpp server as any client sees it."""
    llm = local_llm(model, **settings)
    key = llm.openai_api_key
    assert key is not None
    return ServerLogits(str(llm.openai_api_base), llm.model_name, [end], api_key=key.get_secret_value())


def normalised(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = rows.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    result: NDArray[np.float64] = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return result


def distances(ours: TransformersLogits, theirs: ServerLogits, released: list[int]) -> tuple[float, float]:
    """The largest and the median distance of two backends' log-probabilities of the 50 likeliest tokens, in nats."""
    shown = [Demonstration(0, SHOWN)]
    a, b = (normalised(each.session(ASKED, shown, steps=9).logits([0], released)) for each in (ours, theirs))
    assert a.shape == b.shape
    top = np.argsort(-a, axis=1)[:, :50]
    apart = np.abs(np.take_along_axis(a, top, 1) - np.take_along_axis(b, top, 1))
    return float(apart.max()), float(np.median(apart))


# ------------------------------------------------------------------------------------------- the same float weights


def write_tiny_llama(path: Path) -> None:
    """A llama of two layers with random float weights, and one token per printable character."""
    width, inner, heads, layers, context = 64, 128, 4, 2, 512
    letters = [chr(code).replace(" ", "▁") for code in range(32, 127)] + ["\n"]
    tokens = ["<unk>", "<s>", "</s>", *letters]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(context)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_rope_dimension_count(width // heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([2, 3, 3, *[1] * len(letters)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(True)  # transformers puts it there whatever the file says
    generator = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(f"{name}.weight", (generator.normal(size=shape) * 2 / shape[-1] ** 0.5).astype(np.float32))

    add("token_embd", len(tokens), width)
    add("output", len(tokens), width)
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    for layer in range(layers):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{layer}.{name}", width, width)
        for name, shape in (("ffn_gate", (inner, width)), ("ffn_up", (inner, width)), ("ffn_down", (width, inner))):
            add(f"blk.{layer}.{name}", *shape)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(width, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_two_backends_on_the_same_float_weights_agree(tmp_path: Path) -> None:
    """Measured: at most .016 nats apart over all tokens; llama.cpp keeps keys and values in half precision."""
    path = tmp_path / "tiny.gguf"
    write_tiny_llama(path)
    ours, theirs = TransformersLogits(path), server_of(path, "</s>", context=512)
    assert ours._loaded.tokens(SHOWN) == theirs.tokens(SHOWN)
    assert (ours.vocabulary, ours.end_tokens) == (theirs.vocabulary, theirs.end_tokens)
    shown = [Demonstration(0, SHOWN), Demonstration(1, "name[x]\nx\n\n")]
    a, b = (each.session(ASKED, shown, steps=9) for each in (ours, theirs))
    largest = 0.0
    for rows, released in (([], []), ([0, 1], []), ([1], [50, 60, 70])):
        ours_now, theirs_now = (normalised(each.logits(rows, released)) for each in (a, b))
        largest = max(largest, float(np.abs(ours_now - theirs_now).max()))
        assert np.ptp(ours_now) > 2.0
    assert largest < 0.05


def test_a_prompt_that_llama_cpp_refuses_is_a_row_of_no_numbers(tmp_path: Path) -> None:
    """One that is longer than the context gets a 400 (and a text that is no UTF-8 none at all): the rows beside it keep
    their bits, for every token of an answer, and an answer is drawn."""
    path = tmp_path / "tiny.gguf"
    write_tiny_llama(path)
    server = server_of(path, "</s>", context=512)
    shown = [Demonstration(i, text) for i, text in enumerate([SHOWN, "a" * 600, "name[x]\nx\n\n", "half \ud83d"])]
    assert not server.fits(shown[1].text, ASKED, 9)
    alone = {row: server.session(ASKED, [shown[row]], steps=9) for row in (0, 2)}
    session = server.session(ASKED, shown, steps=9)
    for rows, released in (([0, 1, 2, 3], []), ([1, 2], [50]), ([3, 1, 0], [50, 60])):
        found = session.logits(rows, released)
        for place, row in enumerate(rows, 1):
            if row in alone:
                assert np.array_equal(found[[0, place]], alone[row].logits([0], released))
            else:
                assert np.isnan(found[place]).all()
    settings = Settings(3, 3, 20, 2.0, 1.0, 1.5, ())
    padding = Demonstration("padding", "name[]\n\n\n")
    private = PrivateAnswer(server, settings, bound=2.0, randomness=SecureRandomness(), slots=2, padding=padding)
    private.open(ASKED, lambda: Draw(shown, [[0, 1, 2], [1], [3, 2]]))
    released = list[int]()
    for _ in range(3):
        released.append(private.token(released))
    private.close()
    assert all(0 <= token < server.vocabulary for token in released)


# --------------------------------------------------------------------------------------------- the embedded weights


SMALL = "smollm2-135m-instruct"


@pytest.fixture(scope="module", params=[SMALL, "gemma3-270m"])
def embedded(request: pytest.FixtureRequest) -> tuple[str, TransformersLogits]:
    return request.param, TransformersLogits(request.param)


@pytest.mark.slow
@pytest.mark.model
def test_pieces_and_the_whole_prompt_give_the_same_logits(embedded: tuple[str, TransformersLogits]) -> None:
    """Also behind a demonstration that is longer than a sliding window."""
    import torch

    logits = embedded[1]
    shown = [Demonstration(0, SHOWN), Demonstration(1, SHOWN * 20)]
    network, released = logits._loaded, logits._loaded.tokens("Blue Spice is a")
    session = logits.session(ASKED, shown, steps=9)
    session.logits([0], released[:1])
    found = session.logits([0, 1], released)
    for row, text in zip(found, ["", *(demonstration.text for demonstration in shown)], strict=True):
        ids = [*network.first, *network.tokens(text), *network.tokens(ASKED), *released]
        with torch.inference_mode():
            expected = network.model(input_ids=torch.tensor([ids]), use_cache=False, logits_to_keep=1).logits[0, -1]
        assert np.abs(row - expected.numpy()).max() < 1e-3


@pytest.mark.slow
@pytest.mark.model
def test_a_row_is_bit_identical_beside_any_others(
    embedded: tuple[str, TransformersLogits], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beside one at which the tokeniser raises."""
    logits = embedded[1]
    assert logits._loaded._block == 8
    shown = [Demonstration(i, f"name[{'Blue Spice ' * (i + 1)}]\nIt is number {i}.\n\n") for i in range(9)]
    released = logits._loaded.tokens("Blue Spice is")
    expected = logits.session(ASKED, shown, steps=9).logits([4], released)
    logits.forget(range(9))
    for rows in ([4, 0], [8, 1, 4], [7, 6, 5, 0, 1, 2, 3, 8, 4]):
        found = logits.session(ASKED, shown, steps=9).logits(rows, released)
        assert np.array_equal(found[0], expected[0])
        assert np.array_equal(found[1 + rows.index(4)], expected[1])
    tokens = logits._loaded.tokens
    monkeypatch.setattr(logits._loaded, "tokens", lambda text: 1 // (text != shown[6].text) and tokens(text))
    logits.forget(range(9))
    found = logits.session(ASKED, shown, steps=9).logits([7, 6, 4], released)
    assert np.isnan(found[2]).all()
    assert np.array_equal(found[[0, 3]], expected)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("embedded", [SMALL], indirect=True)
def test_transformers_and_the_embedded_server_agree_as_far_as_quantised_kernels_do(
    embedded: tuple[str, TransformersLogits],
) -> None:
    """llama.cpp rounds what it multiplies to 8 bits. Measured: SmolLM2 .23 nats apart at most, .07 in the median;
    Gemma 3 .39 and .09, which is left out here because the server takes three seconds for a row."""
    name, ours = embedded
    theirs = server_of(name, "<|im_end|>")
    assert ours._loaded.first == theirs.first
    for text in (SHOWN, ASKED, "  two spaces, é and 12.5%"):
        assert ours._loaded.tokens(text) == theirs.tokens(text)
    released = theirs.tokens("Blue Spice is a")
    assert ours.text(released) == theirs.text(released) == "Blue Spice is a"
    largest, median = distances(ours, theirs, released)
    assert median < 0.2
    assert largest < 1.0
