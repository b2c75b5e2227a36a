"""Outputs of every kind, for every aggregator: a member whose output cannot be read abstains, and no more."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from ears import Same
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda

from langchain_dpicl import EmbeddingMean, Keywords, LabelScorer, MembersAbstained, ModelUnavailable, NoisyVote
from langchain_dpicl.aggregators import Aggregator, Words
from langchain_dpicl.aggregators.reading import text_of
from langchain_dpicl.private.boundary import ABSTAIN, arun_private, run_private

SECRET = "Mrs Alder of 9 Elm Street"


class Panic(BaseException):
    """What some libraries raise that is no ``Exception``."""


def _raises(*_: Any, **__: Any) -> Any:
    raise RuntimeError(SECRET)


_METHODS = (
    "__eq__ __ne__ __lt__ __hash__ __len__ __iter__ __getitem__ __contains__ __format__ __repr__ __bool__ __float__ "
    "__index__ __int__ __array__ __add__ __call__ __instancecheck__ strip casefold split lower join encode translate"
).split()


class Text(str):
    """A string whose every method raises, and says another thing than it holds."""

    __slots__ = ()

    def __str__(self) -> str:
        return _raises()


for _name in _METHODS:
    setattr(Text, _name, _raises)


class Whole(int):
    """A number whose methods raise."""


class Vector(np.ndarray):
    """An array whose methods raise."""


for _name in set(_METHODS) - {"__array__"}:
    setattr(Whole, _name, _raises)
    setattr(Vector, _name, _raises)


class Nothing:
    """Every look at it raises."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(SECRET)


class Panics:
    @property
    def __class__(self) -> Any:  # type: ignore[override]
        raise Panic(SECRET)


class SaysItIsText:
    @property
    def __class__(self) -> Any:  # type: ignore[override]
        return str


class SaysItIsANumber:
    @property
    def __class__(self) -> Any:  # type: ignore[override]
        return int


class Message(AIMessage):
    @property
    def text(self) -> Any:
        raise Panic(SECRET)


class Told(AIMessage):
    @property
    def text(self) -> Any:
        return Text("good cough fever")


def _endless() -> Iterator[str]:
    while True:
        yield "good"


NO_TEXT: dict[str, Callable[[], Any]] = {
    "a message of numbers": lambda: AIMessage.model_construct(content=[3]),
    "a message of nothing": lambda: AIMessage.model_construct(content=None),
    "a message without fields": AIMessage.model_construct,
    "a message of odd blocks": lambda: AIMessage.model_construct(content=[{"type": "text", "text": 3}, Nothing()]),
    "a message that panics": lambda: Message("good"),
    "a chunk of numbers": lambda: AIMessageChunk.model_construct(content=[b"good"]),
    "nothing at all": Nothing,
    "no class": Panics,
    "a false text": SaysItIsText,
    "a false number": SaysItIsANumber,
    "a label's number": lambda: 1,
    "a number": lambda: Whole(1),
    "True": lambda: True,
    "an array": lambda: np.zeros(2, np.int64).view(Vector),
    "an array of objects": lambda: np.array([object(), "good"], object),
    "a set of words": lambda: frozenset({"good", "cough"}),
    "a set of odd words": lambda: frozenset({3, ("good",)}),
    "a generator": _endless,
    "a mapping": lambda: {"answer": "good", "text": SECRET},
    "bytes": lambda: b"good",
    "a document": lambda: Document("good"),
    "an error": lambda: ValueError("good"),
    "a class": lambda: str,
    "None": lambda: None,
    "an abstention": lambda: ABSTAIN,
    "an empty text": lambda: "",
    "spaces": lambda: " \n\u3000",
}
TEXTS: dict[str, Callable[[], Any]] = {
    "a text whose methods raise": lambda: Text("good cough fever"),
    "a message of such a text": lambda: Told("bad"),
    "half a character": lambda: "good cough \ud83d fever \udc80",
    "a long text": lambda: "good cough " * 20_000,
    "one long word": lambda: "cough" * 20_000,
    "zeros": lambda: "good\x00cough\x00fever",
}
ZOO = NO_TEXT | TEXTS
PANICS = {"a message that panics", "no class"}
"""Whose errors are no ``Exception``: on public input they pass, as interrupts do."""


class Axes(Embeddings):
    """Two directions; it fails on what a real tokeniser fails on, and gives odd vectors for odd words."""

    def embed_documents(self, texts: list[str]) -> list[Any]:
        return [self.embed_query(text) for text in texts]

    def embed_query(self, text: str) -> Any:
        assert type(text) is str
        text.encode()
        odd: dict[str, Any] = {
            "nan": [np.nan, 0.0],
            "inf": [np.inf, 0.0],
            "long": [1.0, 0.0, 0.0],
            "words": ["east", "west"],
            "odd": [Nothing(), 1.0],
            "none": None,
            "matrix": [[1.0, 0.0]],
            "huge": [1e308, 1e308],
            "tiny": [5e-324, 0.0],
        }
        return odd[text] if text in odd else [1.0, float("good" in text)]


ODD_VECTORS = {
    f"the embedding of {text!r}": (lambda text=text: text) for text in ("nan", "inf", "long", "words", "odd")
}
ODD_VECTORS |= {f"the embedding of {text!r}": (lambda text=text: text) for text in ("none", "matrix")}


def each_word(text: str) -> list[Any]:
    return [Text(word) if word == "cough" else word for word in text.split()]


def prepared(aggregator: Aggregator[Any], **options: float) -> Aggregator[Any]:
    answers = [make() for name, make in ZOO.items() if name not in PANICS]
    return aggregator.prepare({"input": "is it a good cough or a bad fever?"}, options, [*answers, "one", "two"])


AGGREGATORS: dict[str, Callable[[], tuple[Aggregator[Any], float]]] = {
    "vote": lambda: (NoisyVote(["good", "bad"]), 1.0),
    "scores": lambda: (NoisyVote(["good", "bad"], scores=True), 1.0),
    "embedding of a list": lambda: (prepared(EmbeddingMean(Axes(), ["good", "bad"])), 0.5),
    "embedding of answers": lambda: (prepared(EmbeddingMean(Fussy(), RunnableLambda(str))), 0.5),
    "vector": lambda: (prepared(EmbeddingMean(Axes(), release="vector")), 0.5),
    "joint-em of a list": lambda: (prepared(Keywords.joint_em(["good", "bad", "cough"], 2)), 1.0),
    "joint-em of the query": lambda: (prepared(Keywords.joint_em("query", 2)), 1.0),
    "ptr": lambda: (prepared(Keywords.ptr((1, 2), delta0=0.1), delta0=0.1), 0.5),
    "ptr, another tokeniser": lambda: (
        prepared(Keywords.ptr(1, delta0=0.1, words=Words(tokenizer=each_word)), delta0=0.1),
        0.5,
    ),
}


class Fussy(Axes):
    """Embeds several texts at once, and gives a vector for each of them."""

    def embed_query(self, text: str) -> Any:
        return [1.0, float("good" in text)]


def plain(value: object) -> bool:
    """Whether a value is made of built-in types alone."""
    if type(value) is frozenset:
        return all(type(each) is str for each in value)
    if type(value) is np.ndarray:
        return value.dtype == np.int64 and value.ndim == 1
    return value is ABSTAIN or type(value) is int


def encoded(aggregator: Aggregator[Any], hostile: Callable[[], Any], way: str) -> list[Any]:
    """What four members' outputs become, of which the second is the hostile one."""

    def member(values: Mapping[str, Any]) -> Any:
        return hostile() if values["examples"] else "good, a cough"

    bucket: list[dict[str, Any]] = [{"input": SECRET}]
    requests: list[Any] = [({}, bucket if i == 1 else []) for i in range(4)]
    if way == "invoke":
        return run_private(Same(RunnableLambda(member)), requests, max_concurrency=2, reader=aggregator)
    return asyncio.run(arun_private(Same(RunnableLambda(member)), requests, max_concurrency=2, reader=aggregator))


def fails() -> Any:
    raise Panic(SECRET)


class Rounded:
    """Rounded normal noise, which is quick on a fine lattice, from a generator with a seed."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)

    def discrete_gaussian(self, sigma: float, size: int) -> Any:
        return np.rint(self._generator.normal(0.0, sigma, size)).astype(np.int64)

    def integers(self, high: int, size: int) -> Any:
        return self._generator.integers(high, size=size)

    def uniforms(self, size: int) -> Any:
        return self._generator.random(size)


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
@pytest.mark.parametrize("kind", AGGREGATORS)
def test_a_hostile_output_is_read_in_its_own_call_and_moves_no_other(kind: str, way: str) -> None:
    """With the same randomness, one hostile member's release is the release where that member abstains, or says the
    plain text that its output holds; only built-in types come out of a call; whatever comes, nothing raises."""
    aggregator, parameter = AGGREGATORS[kind]()
    without = encoded(aggregator, fails, way)
    assert without[1] is ABSTAIN
    zoo = {**ZOO, **(ODD_VECTORS if kind in ("embedding of a list", "vector") else {})}
    for name, make in zoo.items():
        outputs = encoded(aggregator, make, way)
        assert all(map(plain, outputs)), name
        said = [aggregator.aggregate(outputs, parameter, Rounded(i)) for i in range(4)]
        if name not in TEXTS:
            nobody = [aggregator.aggregate(without, parameter, Rounded(i)) for i in range(4)]
            assert said == nobody, name
            assert outputs[1] is ABSTAIN or not len(outputs[1]), "an answer without words counts like an abstention"
        for release in said:
            assert release is None or json.loads(aggregator.dump(release)) is not None
        others = zip(outputs[:1] + outputs[2:], without[:1] + without[2:], strict=True)
        assert all(np.array_equal(one, other) for one, other in others), name


@pytest.mark.parametrize("name", ZOO)
def test_text_is_plain_or_none(name: str) -> None:
    if name in PANICS:
        return
    text = text_of(ZOO[name]())
    assert type(text) is (str if name in TEXTS or name in ("an empty text", "spaces") else type(None))
    assert name != "a text whose methods raise" or text == "good cough fever"


@pytest.mark.parametrize("kind", AGGREGATORS)
def test_a_public_answer_of_any_kind_is_read_or_refused(kind: str) -> None:
    aggregator, _ = AGGREGATORS[kind]()
    for name, make in {**ZOO, **ODD_VECTORS}.items():
        try:
            found = aggregator.zero_shot(make(), {"input": "?"})
        except (ModelUnavailable, Panic):
            continue
        assert found is None or json.dumps(found, allow_nan=False), name
    for name, make in ZOO.items():
        if name in ("a text whose methods raise", "a message of such a text"):
            aggregator.check_kind(make())


# -- whole releases ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
@pytest.mark.parametrize(
    "name", ["a message of numbers", "a text whose methods raise", "nothing at all", "a generator"]
)
def test_no_owner_fails_a_vote_by_what_a_member_answers(
    name: str, way: str, sealed_of: Callable[..., Any], seeded: Callable[[int], Any]
) -> None:
    """The release is the one where that owner's member raises, with the same coins and the same noise."""

    def answer(output: Callable[[], Any]) -> list[Any]:
        def member(values: Mapping[str, Any]) -> Any:
            is_hostile = any("text 3." in example["input"] for example in values["examples"])
            return output() if is_hostile else "Positive"

        sealed = sealed_of(member, vote=NoisyVote(["Positive", "Negative"], scores=True), epsilon=20.0, members=6)
        found = []
        for i in range(4):
            sealed._randomness, sealed.selector._randomness = seeded(i), seeded(i)
            try:
                value = (
                    sealed.invoke({"input": "?"}) if way == "invoke" else asyncio.run(sealed.ainvoke({"input": "?"}))
                )
            except MembersAbstained:
                value = None
            found.append(value)
        return found

    said = answer(ZOO[name])
    assert any(value is not None for value in said)
    assert said == answer((lambda: "good") if name in TEXTS else fails)


def test_a_label_scorer_that_an_example_breaks_abstains(sealed_of: Callable[..., Any], canary: str) -> None:
    """The scorer reads what its model says within its member's call."""

    class Odd(GenericFakeChatModel):
        def _generate(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
            if "text 3." in str(messages):
                raise Panic(SECRET)
            from langchain_core.outputs import ChatGeneration, ChatResult

            top = [{"token": "Positive", "logprob": -0.1}, {"token": "Negative", "logprob": -3.0}]
            info = {"logprobs": {"content": [{**top[0], "top_logprobs": top}]}}
            return ChatResult(generations=[ChatGeneration(message=AIMessage("Positive"), generation_info=info)])

    scorer = LabelScorer(Odd(messages=iter(())), ["Positive", "Negative"], input_key="input", output_key="output")
    assert [sealed_of(scorer).invoke({"input": "?"}) for _ in range(3)] == ["Positive"] * 3


def test_a_prompt_that_an_example_breaks_abstains(sealed_of: Callable[..., Any]) -> None:
    prompt = ChatPromptTemplate.from_template("{examples} {input}")

    def member(values: Mapping[str, Any]) -> Any:
        if any("text 3." in example["input"] for example in values["examples"]):
            values["examples"].append({})  # a record that lacks the store's keys
        return prompt.invoke(dict(values)) and "Positive"

    assert sealed_of(member).invoke({"input": "?"}) == "Positive"
