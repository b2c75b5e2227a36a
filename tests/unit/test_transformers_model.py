"""The backend on transformers, with tiny random weights: right numbers, rows that know nothing of each other, states
that are bounded and forgotten."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from langchain_dpicl.decoding.backends.transformers_model import StateCache, TransformersLogits
from langchain_dpicl.decoding.model import Demonstration
from langchain_dpicl.errors import InvalidParameter, LocalModelError, UnsafeConfigurationError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCABULARY, CONTEXT = 120, 256
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SECRET = "Mrs Alder of 9 Elm Street"


def characters() -> Any:
    """A tokeniser with one token per printable character, and a token in front of every text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    known = ["<pad>", "<bos>", "<eos>", "<unk>", *map(chr, range(32, 127)), "\n"]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(known)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>", pad_token="<pad>"
    )


def network(kind: str) -> Any:
    """A causal model with random weights, scaled so that its scores are nats apart."""
    configs = {
        "llama": lambda: transformers.LlamaConfig(**SIZES),
        "gemma3, window of 16": lambda: transformers.Gemma3TextConfig(
            **SIZES, sliding_window=16, layer_types=["sliding_attention", "full_attention"]
        ),
        "gemma2, capped scores": lambda: transformers.Gemma2Config(**SIZES, final_logit_softcapping=5.0),
    }
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(configs[kind]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6.0)
    return model


KINDS = ["llama", "gemma3, window of 16", "gemma2, capped scores"]


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    yield request.param
    assert torch.get_num_threads() == before


def demonstrations(count: int) -> list[Demonstration]:
    return [Demonstration(i, f"name[{'abcdefgh'[i % 8] * (1 + 3 * i)}]\nIt is number {i}.\n\n") for i in range(count)]


def plain(model: Any, text: str, released: list[int]) -> Any:
    """The scores by one forward over the whole prompt."""
    tokenizer = characters()
    ids = [1, *tokenizer(text, add_special_tokens=False)["input_ids"], *released]
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].numpy()


# ------------------------------------------------------------------------------------------------ the right numbers


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_is_what_one_forward_over_its_whole_prompt_gives(kind: str) -> None:
    model, shared, some = network(kind), "name[Blue Spice]\n", demonstrations(4)
    logits = TransformersLogits((model, characters()))
    session = logits.session(shared, some, steps=6)
    released: list[int] = []
    for rows in ([], [0, 2], [1], [3, 1, 0], [2], [0, 1, 2, 3]):
        found = session.logits(rows, released)
        assert found.shape == (1 + len(rows), VOCABULARY)
        assert found.dtype == np.float32
        expected = [plain(model, text + shared, released) for text in ["", *(some[row].text for row in rows)]]
        np.testing.assert_allclose(found, expected, atol=1e-3)
        assert np.ptp(found[0]) > 1.0
        released.append(int(found[0].argmax()))


def test_packed_weights_give_the_same_scores_and_a_folder_is_loaded_like_its_model(tmp_path: Path) -> None:
    model, some = network("gemma3, window of 16"), demonstrations(3)
    model.save_pretrained(tmp_path)
    characters().save_pretrained(tmp_path)
    given, loaded = TransformersLogits((model, characters())), TransformersLogits(tmp_path)
    rows = [each.session("name[x]\n", some, steps=3).logits([2, 0], [40, 41]) for each in (given, loaded)]
    np.testing.assert_allclose(rows[0], rows[1], atol=1e-3)
    assert any("Packed" in type(layer).__name__ for layer in loaded._loaded.model.modules())
    assert type(model.lm_head) is torch.nn.Linear  # the caller's model is left as it was
    assert loaded.name == given.name


def test_another_model_has_another_name() -> None:
    other = network("llama")
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[3, 5] += 1.0
    first, second = (TransformersLogits((model, characters())) for model in (network("llama"), other))
    assert first.name != second.name
    assert first.name == TransformersLogits((network("llama"), characters())).name


def test_a_model_that_caps_its_scores_is_used_whole_and_one_that_does_not_is_taken_apart() -> None:
    assert TransformersLogits((network("gemma2, capped scores"), characters()))._loaded._head is None
    assert TransformersLogits((network("llama"), characters()))._loaded._block == 8


def test_released_tokens_read_back_without_the_end() -> None:
    logits = TransformersLogits((network("llama"), characters()))
    tokens = characters()("The Blue Spice.", add_special_tokens=False)["input_ids"]
    assert logits.end_tokens == {2}
    assert logits.vocabulary == VOCABULARY
    assert logits.text([*tokens, 2]) == "The Blue Spice."
    assert logits.text([]) == ""


# --------------------------------------------------------------- rows know nothing of each other, to the last bit


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_bit_identical_whatever_the_other_rows_are(kind: str, threads: int) -> None:
    """Another owner's presence, content, place or number; read before, kept, or made anew: not a bit of a row moves."""
    model, shared, some = network(kind), "name[Blue Spice], area[riverside]\n", demonstrations(12)
    released = [40, 70, 71, 33, 90]
    alone = {}
    for row, demonstration in enumerate(some):
        fresh = TransformersLogits((model, characters()), threads=threads)
        alone[row] = fresh.session(shared, [demonstration], steps=9).logits([0], released)
    for memory in (0, 30_000, 1 << 30):
        logits = TransformersLogits((model, characters()), threads=threads, memory_bytes=memory)
        for step, generator in enumerate(np.random.default_rng(seed) for seed in range(4)):
            session = logits.session(shared, some, steps=9)
            order = generator.permutation(12)[: [1, 3, 8, 12][step]].tolist()
            session.logits(generator.permutation(12)[:4].tolist(), released[:2])
            found = session.logits(order, released)
            for place, row in enumerate(order):
                assert np.array_equal(found[1 + place], alone[row][1]), (memory, row, place)


def test_the_zero_shot_row_does_not_depend_on_the_rows_beside_it(threads: int) -> None:
    model, some, released = network("llama"), demonstrations(9), [40, 70, 71, 33, 90]
    found = []
    for rows in ([], [0], [1, 2, 3, 4], list(range(9))):
        logits = TransformersLogits((model, characters()), threads=threads)
        session = logits.session("name[x]\n", some, steps=9)
        found.append([session.logits(rows, released[:step])[0] for step in range(6)])
    assert all(np.array_equal(other, found[0]) for other in found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", ["its tokeniser raises", "its forward raises", "a token that is not embedded"])
def test_a_row_that_fails_is_no_number_and_moves_no_bit_of_another(kind: str, fault: str, threads: int) -> None:
    """One demonstration ("~") at which the tokeniser or the model raises, among eleven, from the first step on."""
    model, shared, some = network(kind), "name[Blue Spice]\n", demonstrations(11)
    expected = TransformersLogits((model, characters()), threads=threads)
    tokenizer, bad = characters(), 6
    some[bad] = Demonstration("bad", "name[~]\n\n")
    if fault == "its tokeniser raises":

        class Panicking(type(tokenizer)):  # type: ignore[misc]
            def __call__(self, text: str, **options: Any) -> Any:
                if "~" in text:
                    raise type("PanicException", (BaseException,), {})(text)
                return super().__call__(text, **options)

        tokenizer.__class__ = Panicking
    elif fault == "its forward raises":
        mark = tokenizer("~", add_special_tokens=False)["input_ids"][0]

        def refuse(_: Any, values: Any) -> None:
            if (values[0] == mark).any():
                raise RuntimeError(f"cannot read {SECRET}")

        model.get_input_embeddings().register_forward_pre_hook(refuse)
    else:
        tokenizer.add_tokens(["[~]"])
        tokenizer.add_tokens([f"<more{i}>" for i in range(VOCABULARY)])
        tokenizer.add_tokens(["~]"])
        some[bad] = Demonstration("bad", "name~]\n\n")
    logits = TransformersLogits((model, tokenizer), threads=threads)
    session, plain = (each.session(shared, some, steps=9) for each in (logits, expected))
    for rows, released in (([0, bad, 1], []), ([bad], []), ([10, 3, bad, 4, 8, 2, 7, 9, 1, 0, 5], [40, 70])):
        found = session.logits(rows, released)
        without = plain.logits([row for row in rows if row != bad], released)
        assert np.array_equal(np.delete(found, 1 + rows.index(bad), axis=0), without)
        assert np.isnan(found[1 + rows.index(bad)]).all()
    assert logits.states.get(some[bad]) is None


def test_where_blocks_would_carry_one_row_into_another_they_have_one_row() -> None:
    """An output layer whose rows feel their neighbours in the last digits, as a careless kernel's do."""

    class Careless(torch.nn.Linear):
        def forward(self, values: Any) -> Any:
            return super().forward(values) + 1e-6 * values.mean()

    model = network("llama")
    careless = Careless(48, VOCABULARY, bias=False)
    careless.weight = model.lm_head.weight
    model.lm_head = careless
    loaded = TransformersLogits((model, characters()))._loaded
    assert loaded._head is not None
    assert loaded._block == 1


# ------------------------------------------------------------------------------------- states: bounded and private


def test_a_demonstration_is_read_once_for_all_answers_until_it_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = TransformersLogits((network("llama"), characters()))
    read: list[int] = []
    original = logits._loaded.read

    def counting(tokens: list[int], cache: Any) -> Any:
        read.append(len(tokens))
        return original(tokens, cache)

    monkeypatch.setattr(logits._loaded, "read", counting)
    some = demonstrations(1)
    size = 1 + len(some[0].text)
    for shared in ("name[x]\n", "name[other]\n"):
        session = logits.session(shared, some, steps=4)
        session.logits([0], [])
        session.logits([0], [40])
        session.close()
    assert read.count(size) == 1
    assert read[:3] == [1 + 8, size, 8]  # zero-shot, the demonstration, then the shared text after it
    assert read[3:5] == [1, 9]  # zero-shot grows by a token
    logits.forget([some[0].key])
    assert len(logits.states) == 0
    assert logits.states.bytes == 0
    logits.session("name[x]\n", some, steps=4).logits([0], [])
    assert read.count(size) == 2


def test_kept_states_stay_within_their_bytes_and_are_counted_as_they_are() -> None:
    some = demonstrations(6)
    logits = TransformersLogits((network("llama"), characters()), memory_bytes=30_000)
    session = logits.session("x", some, steps=2)
    for row in range(6):
        session.logits([row], [])
        assert logits.states.bytes <= 30_000
    kept = {demonstration.key for demonstration in some if logits.states.get(demonstration) is not None}
    assert kept
    assert 0 not in kept  # used longest ago
    per_token = 2 * 2 * 2 * 12 * 4  # layers, keys and values, heads, their width, bytes
    alone = TransformersLogits((network("llama"), characters()))
    alone.session("x", some[:1], steps=2).logits([0], [])
    assert alone.states.bytes == per_token * (1 + len(some[0].text)) + 4 * 48


def test_a_window_keeps_no_more_than_it_needs() -> None:
    long = Demonstration("long", "a" * 200)
    logits = TransformersLogits((network("gemma3, window of 16"), characters()))
    logits.session("x", [long], steps=2).logits([0], [])
    full, window, vector = 2 * 2 * 12 * 4 * 201, 2 * 2 * 12 * 4 * 15, 4 * 48
    assert logits.states.bytes == full + window + vector


def test_the_cache_keeps_what_was_used_last_and_nothing_over_its_bound() -> None:
    cache, some = StateCache(100), demonstrations(4)
    for demonstration in some[:2]:
        cache.put(demonstration, object(), 50)
    cache.get(some[0])
    cache.put(some[2], object(), 50)
    assert [cache.get(each) is not None for each in some] == [True, False, True, False]
    cache.put(some[3], object(), 101)
    assert cache.get(some[3]) is None
    assert (cache.bytes, len(cache)) == (100, 2)
    cache.put(some[0], object(), 10)
    assert cache.bytes == 60
    assert cache.get(Demonstration(some[0].key, "another text")) is None
    cache.forget([some[0].key, "unknown"])
    assert (cache.bytes, len(cache)) == (50, 1)


def test_threads_may_share_a_model() -> None:
    logits, some = TransformersLogits((network("llama"), characters()), memory_bytes=40_000), demonstrations(6)
    expected = logits.session("name[x]\n", some, steps=4).logits(range(6), [40])
    found: list[Any] = []

    def answer() -> None:
        session = logits.session("name[x]\n", some, steps=4)
        logits.forget([0, 3])
        found.append(session.logits(range(6), [40]))

    workers = [threading.Thread(target=answer) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == 4
    assert all(np.array_equal(each, expected) for each in found)


def test_nothing_shows_a_demonstration() -> None:
    logits = TransformersLogits((network("llama"), characters()))
    demonstration = Demonstration(0, SECRET)
    session = logits.session("name[x]\n", [demonstration], steps=4)
    session.logits([0], [])
    for thing in (logits, session, logits.states, demonstration, logits._loaded):
        assert SECRET not in repr(thing)
        assert SECRET not in str(thing)
    for thing in (logits, session, logits.states):
        with pytest.raises(UnsafeConfigurationError):
            pickle.dumps(thing)
        with pytest.raises(UnsafeConfigurationError):
            copy.deepcopy(thing)
    session.close()
    assert SECRET not in repr(vars(session))


# ------------------------------------------------------------------------------------------------------- bad input


def test_prompts_that_do_not_fit_are_told_before_they_are_read() -> None:
    logits = TransformersLogits((network("llama"), characters()))
    assert logits.fits("a" * 200, "b" * 45, 10)
    assert not logits.fits("a" * 200, "b" * 45, 11)
    with pytest.raises(InvalidParameter, match="steps=300"):
        logits.session("b", [], steps=300)


def test_released_tokens_only_grow() -> None:
    session = TransformersLogits((network("llama"), characters())).session("b", [], steps=9)
    session.logits([], [40, 41])
    with pytest.raises(InvalidParameter, match="released"):
        session.logits([], [40])


@pytest.mark.parametrize(
    ("settings", "parameter"),
    [
        ({"model": 3}, "model"),
        ({"memory_bytes": -1}, "memory_bytes"),
        ({"memory_bytes": 1.5}, "memory_bytes"),
        ({"threads": 0}, "threads"),
        ({"threads": True}, "threads"),
        ({"dtype": "int8"}, "dtype"),
    ],
)
def test_a_parameter_outside_its_bounds_is_named(settings: dict[str, Any], parameter: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        TransformersLogits(**settings)
    assert caught.value.parameter == parameter


def test_a_model_without_scores_or_with_another_memory_is_refused() -> None:
    body = network("llama").model  # gives vectors, no scores
    recurrent = transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, state_size=4)
    )
    for model in (body, recurrent, object()):
        with pytest.raises(InvalidParameter, match="model="):
            _ = TransformersLogits((model, characters())).vocabulary


def test_weights_that_cannot_be_loaded_say_so(tmp_path: Path) -> None:
    with pytest.raises(LocalModelError, match="no such model"):
        _ = TransformersLogits(tmp_path / "absent.gguf").name
    with pytest.raises(LocalModelError, match="cannot load"):
        _ = TransformersLogits(tmp_path).name
