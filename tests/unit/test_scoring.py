"""`LabelScorer` against a server whose token distribution is known, over real HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.outputs import Generation
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_openai import ChatOpenAI, OpenAI

from langchain_dpicl import NoisyVote
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.members.scoring import LabelScorer, Position, _positions, label_prompt, label_scores
from langchain_dpicl.privacy import SecureRandomness
from langchain_dpicl.privacy.choice import Crowd

Table = dict[str, dict[str, float]]


class Server:
    """An OpenAI-compatible server that answers greedily from ``table``: answer so far -> next token -> probability.

    A prompt that contains "N/A" is answered from ``free`` instead. ``style`` is the shape of the log-probabilities.
    """

    def __init__(self) -> None:
        self.table: Table = {}
        self.free: Table = {}
        self.style = "content"
        self.requests: list[dict[str, Any]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.requests.append(body)
                reply = json.dumps(server.answer(self.path, body)).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            def log_message(self, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        chat = path.endswith("/chat/completions")
        prompts = [json.dumps(body["messages"])] if chat else body["prompt"]
        choices = []
        for index, prompt in enumerate([prompts] if isinstance(prompts, str) else prompts):
            text, steps = self.greedy(self.free if "N/A" in prompt and self.free else self.table, body)
            choice: dict[str, Any] = {"index": index, "finish_reason": "length", "logprobs": self.shape(steps)}
            choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            choices.append(choice)
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return {"id": "x", "object": "x", "created": 0, "model": "fake", "choices": choices, "usage": usage}

    def greedy(self, table: Table, body: dict[str, Any]) -> tuple[str, list[tuple[str, dict[str, float]]]]:
        text, steps = "", []
        limit = body.get("max_tokens") or body.get("max_completion_tokens")
        most = body.get("top_logprobs") or body["logprobs"]
        while len(steps) < limit and text in table:
            ranked = dict(sorted(table[text].items(), key=lambda item: -item[1])[:most])
            token = next(iter(ranked))
            steps.append((token, ranked))
            if not token:
                break
            text += token
        return text, steps

    def shape(self, steps: list[tuple[str, dict[str, float]]]) -> Any:
        if self.style == "none":
            return None
        if self.style == "legacy":
            return {
                "tokens": [token for token, _ in steps],
                "token_logprobs": [math.log(top[token]) for token, top in steps],
                "top_logprobs": [{other: math.log(p) for other, p in top.items()} for _, top in steps],
                "text_offset": [0 for _ in steps],
            }

        def entry(token: str, p: float) -> dict[str, Any]:
            return {"token": token, "bytes": list(token.encode()), "logprob": math.log(p)}

        return {
            "content": [
                {**entry(token, top[token]), "top_logprobs": [entry(other, p) for other, p in top.items()]}
                for token, top in steps
            ]
        }


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.http.shutdown()
    running.http.server_close()


def completion(server: Server, **settings: Any) -> OpenAI:
    return OpenAI(base_url=server.url, api_key="x", model="fake", max_retries=0, **settings)


def chat(server: Server, **settings: Any) -> ChatOpenAI:
    return ChatOpenAI(base_url=server.url, api_key="x", model="fake", max_retries=0, **settings)


def normalised(values: dict[str, float]) -> dict[str, Any]:
    return pytest.approx({key: value / sum(values.values()) for key, value in values.items()})


SIMPLE: Table = {"": {" Red": 0.5, " Blue": 0.3, " Green": 0.1, " The": 0.1}}


# ------------------------------------------------------------------------------------------------ scores are exact


@pytest.mark.parametrize("make", [completion, chat])
def test_labels_with_distinct_first_tokens_score_their_probability(server: Server, make: Any) -> None:
    server.table = SIMPLE
    scorer = LabelScorer(make(server), ["Red", "Blue", "Green"], calibrate=False)
    assert scorer.scores({"input": "x"}) == normalised({"Red": 0.5, "Blue": 0.3, "Green": 0.1})
    assert scorer.invoke({"input": "x"}) == "Red"


def test_both_shapes_of_log_probabilities_give_the_same_scores(server: Server) -> None:
    server.table = {"": {" Bill": 0.6, " Tech": 0.4}, " Bill": {"ing": 0.7, "\n": 0.3}}
    scorer = LabelScorer(completion(server), ["Bill", "Billing", "Tech"], calibrate=False)
    modern = scorer.scores({"input": "x"})
    server.style = "legacy"
    assert scorer.scores({"input": "x"}) == pytest.approx(modern)
    assert modern == normalised({"Bill": 0.6 * 0.3, "Billing": 0.6 * 0.7, "Tech": 0.4})


def test_a_label_that_begins_another_is_told_apart_by_the_next_token(server: Server) -> None:
    server.table = {
        "": {" Bill": 0.5, " Tech": 0.3, " B": 0.1, "x": 0.1},
        " Bill": {"ing": 0.6, "\n": 0.3, "s": 0.1},
    }
    scorer = LabelScorer(completion(server), ["Bill", "Billing", "Tech"], calibrate=False)
    # " B" could become either, so both get half of it; "Bills" is neither.
    expected = {"Bill": 0.05 + 0.5 * 0.3, "Billing": 0.05 + 0.5 * 0.6, "Tech": 0.3}
    assert scorer.scores({"input": "x"}) == normalised(expected)


def test_the_end_of_the_answer_ends_the_label(server: Server) -> None:
    server.table = {"": {"Bill": 0.9, "Tech": 0.1}, "Bill": {"": 0.8, "ing": 0.2}}
    scorer = LabelScorer(chat(server), ["Bill", "Billing", "Tech"], calibrate=False)
    assert scorer.scores({"input": "x"}) == normalised({"Bill": 0.72, "Billing": 0.18, "Tech": 0.1})


@pytest.mark.parametrize("end", ["<|im_end|>", "</s>", "<end_of_turn>", "<eos>", "<|endoftext|>"])
def test_named_end_tokens_end_the_label(end: str) -> None:
    positions = [
        Position(b"Bill", [(b"Bill", 1.0), (b"x", 0.0)]),
        Position(end.encode(), [(end.encode(), 0.9), (b"ing", 0.1)]),
    ]
    assert label_scores(positions, ["Billing", "Bill"]) == pytest.approx([0.1, 0.9])


def test_a_shared_prefix_of_several_tokens_is_followed(server: Server) -> None:
    server.table = {
        "": {" team": 0.9, " A": 0.1},
        " team": {"-": 1.0 - 1e-9, "x": 1e-9},
        " team-": {"a": 0.7, "b": 0.2, "c": 0.1},
    }
    scorer = LabelScorer(completion(server), ["team-a", "team-b", "other"], calibrate=False)
    scores = scorer.scores({"input": "x"})
    assert scores["team-a"] / scores["team-b"] == pytest.approx(3.5)
    # "other" is not among the alternatives: it gets the least likely one of the position that it left.
    assert scores["other"] / scores["team-b"] == pytest.approx(0.1 / (0.9 * 0.2), rel=1e-6)


def test_labels_off_the_greedy_path_share_their_common_token(server: Server) -> None:
    server.table = {"": {" Other": 0.6, " team": 0.4}}
    scorer = LabelScorer(completion(server), ["team-a", "team-b", "Other"], calibrate=False)
    assert scorer.scores({"input": "x"}) == normalised({"team-a": 0.2, "team-b": 0.2, "Other": 0.6})


def test_case_spaces_quotes_and_tokeniser_marks_do_not_matter(server: Server) -> None:
    server.table = {"": {"RED": 0.2, " red": 0.2, "\u2581Red": 0.1, ' "Blue': 0.3, "\u0120blue": 0.1, "\n": 0.1}}
    scorer = LabelScorer(completion(server), ["Red", "Blue"], calibrate=False, max_tokens=1)
    # The newline fits both: it tells none from the other, and its share is the same for both.
    assert scorer.scores({"input": "x"}) == normalised({"Red": 0.55, "Blue": 0.45})


def test_a_leading_space_token_is_passed_over(server: Server) -> None:
    server.table = {"": {" ": 0.8, "Red": 0.2}, " ": {"Blue": 0.9, "Red": 0.1}}
    scorer = LabelScorer(completion(server), ["Red", "Blue"], calibrate=False, max_tokens=2)
    assert scorer.scores({"input": "x"}) == normalised({"Red": 0.2 + 0.08, "Blue": 0.72})


def test_unicode_labels_match_in_any_composition_and_case(server: Server) -> None:
    server.table = {"": {"CAFE\u0301": 0.6, "caf\u00e9": 0.1, "STRASSE": 0.2, "日本": 0.1}}
    scorer = LabelScorer(completion(server), ["Café", "straße", "日本"], calibrate=False)
    assert scorer.scores({"input": "x"}) == normalised({"Café": 0.7, "straße": 0.2, "日本": 0.1})


def test_a_character_split_between_tokens_is_put_together() -> None:
    first, second = "é".encode()[:1], "é".encode()[1:]
    other = "è".encode()[1:]
    positions = [
        Position(first, [(first, 0.8), (b"e", 0.2)]),
        Position(second, [(second, 0.75), (other, 0.25)]),
    ]
    assert label_scores(positions, ["été", "ère", "en"]) == pytest.approx([0.6, 0.2, 0.2])


def test_the_legacy_spelling_of_half_a_character_is_read(server: Server) -> None:
    server.style = "legacy"
    server.table = {"": {"bytes:\\xc3": 0.8, "e": 0.2}, "bytes:\\xc3": {"bytes:\\xa9": 0.75, "bytes:\\xa8": 0.25}}
    scorer = LabelScorer(completion(server), ["été", "ère", "en"], calibrate=False)
    assert scorer.scores({"input": "x"}) == normalised({"été": 0.6, "ère": 0.2, "en": 0.2})


def test_a_label_never_returned_gets_the_least_likely_alternative(server: Server) -> None:
    server.table = SIMPLE
    scorer = LabelScorer(completion(server), ["Red", "Blue", "Violet"], calibrate=False, top_logprobs=3)
    assert scorer.scores({"input": "x"}) == normalised({"Red": 0.5, "Blue": 0.3, "Violet": 0.1})


@pytest.mark.parametrize(
    "table",
    [
        {"": {" I": 0.7, " Sorry": 0.3}},  # no label
        {"": {"<think>": 0.9, "\n": 0.1}},  # a token that fits every label tells none
        {"": {" Bl": 0.9, " So": 0.1}, " Bl": {"ah": 0.8, "ubb": 0.2}},  # what two labels share, and then neither
    ],
    ids=["no label", "thinking", "left later"],
)
def test_an_answer_among_whose_alternatives_is_no_label_is_no_vote(server: Server, table: Any) -> None:
    server.table = server.free = table
    scorer = LabelScorer(completion(server), ["Blue", "Black"], calibrate=False)
    for ask in (scorer.scores, scorer.invoke):
        with pytest.raises(InvalidParameter, match="among the model's alternatives"):
            ask({"input": "x", "examples": [{"text": "y", "label": "Blue"}]})


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 0.05])
def test_a_log_probability_that_cannot_be_one_is_not_read_as_certainty(wrong: float) -> None:
    top = [{"token": token, "logprob": value} for token, value in (("Red", -0.01), ("Blue", wrong))]
    content = [{"token": "Red", "logprob": -0.01, "top_logprobs": top}]
    with pytest.raises(InvalidParameter, match="of at most 0"):
        _positions(Generation(text="Red", generation_info={"logprobs": {"content": content}}))
    top[1]["logprob"] = 1e-5  # rounding
    (position,) = _positions(Generation(text="Red", generation_info={"logprobs": {"content": content}}))
    assert dict(position.top)[b"Blue"] == 1.0


def test_probabilities_that_underflow_do_not_break_the_division() -> None:
    positions = [Position(b"a", [(b"a", 1.0), (b"b", 0.0)])]
    assert all(score > 0 for score in label_scores(positions, ["a", "b"]))


# --------------------------------------------------------------------------------------------------- calibration


@pytest.mark.parametrize("make", [completion, chat])
def test_calibration_divides_by_the_content_free_scores(server: Server, make: Any) -> None:
    server.table = {"": {" Red": 0.6, " Blue": 0.4}}
    server.free = {"": {" Red": 0.8, " Blue": 0.2}}
    scorer = LabelScorer(make(server), ["Red", "Blue"])
    assert scorer.scores({"input": "x"}) == normalised({"Red": 0.75, "Blue": 2.0})
    assert scorer.invoke({"input": "x"}) == "Blue"
    assert asyncio.run(scorer.ainvoke({"input": "x"})) == "Blue"
    assert LabelScorer(make(server), ["Red", "Blue"], calibrate=False).invoke({"input": "x"}) == "Red"


def test_several_content_free_texts_count_by_their_geometric_mean(server: Server) -> None:
    server.table = {"": {" Red": 0.5, " Blue": 0.5}}
    server.free = {"": {" Red": 0.8, " Blue": 0.2}}
    scorer = LabelScorer(completion(server), ["Red", "Blue"], content_free=["N/A", "nothing"])
    assert scorer.calls == 3
    assert scorer.scores({"input": "x"}) == normalised(
        {"Red": 0.5 / (0.8 * 0.5) ** 0.5, "Blue": 0.5 / (0.2 * 0.5) ** 0.5}
    )


@pytest.mark.parametrize("make", [completion, chat])
@pytest.mark.parametrize(
    "table", [SIMPLE, {"": {"": 0.9, "x": 0.1}}, {"": {" R": 0.9, " B": 0.1}, " R": {"ed": 1 - 1e-9, "x": 1e-9}}]
)
def test_the_calls_never_depend_on_what_comes_back(server: Server, make: Any, table: Table) -> None:
    server.table = table
    scorer = LabelScorer(make(server), ["Red", "Blue"])
    with contextlib.suppress(InvalidParameter):  # no label among the alternatives
        scorer.invoke({"input": "x", "examples": [{"text": "a", "label": "Red"}]})
    assert len(server.requests) == scorer.calls == 2
    assert {request.get("max_tokens") or request.get("max_completion_tokens") for request in server.requests} == {
        scorer.max_tokens
    }
    assert all(request["temperature"] == 0 for request in server.requests)


def test_tokens_asked_for_follow_from_the_labels_alone(server: Server) -> None:
    model = completion(server)
    assert LabelScorer(model, ["Red", "Blue"]).max_tokens == 1
    assert LabelScorer(model, ["Bill", "Billing", "Tech"]).max_tokens == 5
    assert LabelScorer(model, ["a" * 100, "a" * 100 + "b"]).max_tokens == 16
    assert LabelScorer(model, ["Red", "Blue"], max_tokens=3).max_tokens == 3


# ------------------------------------------------------------------------------------------------------- prompts


def test_the_default_prompt_is_instruction_examples_query_and_calibration_shares_it_up_to_the_query(
    server: Server,
) -> None:
    server.table = SIMPLE
    scorer = LabelScorer(completion(server), ["Red", "Blue"], query_key="question")
    examples = [{"text": "a\n\nLabel: Blue", "label": "Red"}, {"text": "b", "label": "Blue"}]
    scorer.invoke({"question": "why\nso?", "examples": examples})
    prompts = [request["prompt"][0] for request in server.requests]
    head = "Labels: Red, Blue.\n\nInput: a Label: Blue\nLabel: Red\n\nInput: b\nLabel: Blue\n\nInput: "
    assert prompts == [head + "why so?\nLabel:", head + "N/A\nLabel:"]


def test_no_examples_and_no_key_ask_the_zero_shot_prompt(server: Server) -> None:
    server.table = SIMPLE
    scorer = LabelScorer(completion(server), ["Red", "Blue"], calibrate=False)
    scorer.invoke({"input": "q"})
    scorer.invoke({"input": "q", "examples": []})
    assert [request["prompt"][0] for request in server.requests] == ["Labels: Red, Blue.\n\nInput: q\nLabel:"] * 2
    assert label_prompt([], "q", instruction="") == "Input: q\nLabel:"


def test_a_bucket_names_its_keys(server: Server) -> None:
    class Bucket(list[dict[str, str]]):
        input_key, output_key = "message", "desk"

    server.table = SIMPLE
    scorer = LabelScorer(completion(server), ["Red", "Blue"], calibrate=False, instruction="")
    scorer.invoke({"input": "q", "examples": Bucket([{"message": "m", "desk": "Red"}])})
    assert server.requests[0]["prompt"] == ["Input: m\nLabel: Red\n\nInput: q\nLabel:"]


def test_prompts_may_be_templates_or_functions(server: Server) -> None:
    server.table = SIMPLE
    labels = ["Red", "Blue"]
    template = PromptTemplate.from_template("{labels} {input}:")
    messages = ChatPromptTemplate.from_messages([("system", "Pick from {labels}"), ("human", "{input}")])
    for model, prompt in (
        (completion(server), template),
        (chat(server), messages),
        (completion(server), lambda values: f"{len(values['examples'])} {values['input']}:"),
    ):
        assert LabelScorer(model, labels, prompt=prompt, calibrate=False).invoke({"input": "q"}) == "Red"
    assert server.requests[0]["prompt"] == ["['Red', 'Blue'] q:"]
    assert server.requests[1]["messages"][1]["content"] == "q"
    assert server.requests[2]["prompt"] == ["0 q:"]


# ----------------------------------------------------------------------------------------------------- as a Runnable


async def test_async_and_batch_twins_agree(server: Server) -> None:
    server.table, server.free = SIMPLE, {"": {" Red": 0.8, " Blue": 0.1, " Green": 0.1}}
    scorer = LabelScorer(completion(server), ["Red", "Blue", "Green"])
    inputs = [{"input": str(i)} for i in range(5)]
    one_by_one = [scorer.invoke(values) for values in inputs]
    assert scorer.batch(inputs) == await scorer.abatch(inputs) == one_by_one == ["Blue"] * 5
    assert await scorer.ascores(inputs[0]) == scorer.scores(inputs[0])
    assert (scorer | str.upper).invoke(inputs[0]) == "BLUE"


def test_the_model_is_a_copy_without_cache_and_callbacks(server: Server) -> None:
    model = completion(server, cache=True, verbose=True)
    scorer = LabelScorer(model, ["Red", "Blue"])
    assert scorer.llm.cache is False
    assert not scorer.llm.verbose
    assert model.cache is True


# ------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "labels",
    [
        "Red",
        [],
        ["Red"],
        ["Red", "red"],
        ["Red", " Red "],
        ["Red", ""],
        ["Red", "  "],
        ["Red", 3],
        ["Red", None],
        None,
        {"a", "b"},
    ],
)
def test_labels_are_checked(server: Server, labels: Any) -> None:
    with pytest.raises(InvalidParameter, match="labels"):
        LabelScorer(completion(server), labels)


@pytest.mark.parametrize(
    "settings",
    [
        {"top_logprobs": 1},
        {"top_logprobs": True},
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"query_key": ""},
        {"input_key": 3},
        {"prompt": "text"},
        {"content_free": []},
        {"content_free": [1]},
    ],
)
def test_settings_are_checked(server: Server, settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter, match=next(iter(settings))):
        LabelScorer(completion(server), ["Red", "Blue"], **settings)


def test_a_model_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="llm"):
        LabelScorer("gpt", ["Red", "Blue"])  # type: ignore[arg-type]


SECRET = "Ada Berg has asthma"


def assert_silent(error: BaseException) -> None:
    assert SECRET not in f"{error!s}{error!r}"
    assert error.__cause__ is None
    assert error.__context__ is None


@pytest.mark.parametrize("make", [completion, chat])
def test_a_server_without_log_probabilities_is_named_and_no_text_shown(server: Server, make: Any) -> None:
    server.table, server.style = SIMPLE, "none"
    with pytest.raises(InvalidParameter, match="log-probabilities") as caught:
        LabelScorer(make(server), ["Red", "Blue"]).invoke({"input": SECRET})
    assert_silent(caught.value)


def test_a_model_class_without_log_probabilities_is_named() -> None:
    with pytest.raises(InvalidParameter, match="log-probabilities") as caught:
        LabelScorer(FakeListChatModel(responses=["Red"]), ["Red", "Blue"]).invoke({"input": SECRET})
    assert_silent(caught.value)


@pytest.mark.parametrize(
    ("values", "parameter"),
    [
        ({"question": SECRET}, "query_key"),
        ({"input": SECRET, "examples": [{"text": SECRET}]}, "examples"),
        ({"input": SECRET, "examples": [SECRET]}, "examples"),
    ],
)
def test_input_that_does_not_fit_is_refused_without_its_text(server: Server, values: Any, parameter: str) -> None:
    with pytest.raises(InvalidParameter, match=parameter) as caught:
        LabelScorer(completion(server), ["Red", "Blue"]).invoke(values)
    assert_silent(caught.value)
    assert not server.requests


def test_repr_shows_public_settings_only(server: Server) -> None:
    scorer = LabelScorer(completion(server), ["Red", "Blue"], prompt=lambda values: SECRET)
    assert repr(scorer) == "LabelScorer(llm=OpenAI, labels=['Red', 'Blue'], calibrate=True, calls=2, max_tokens=1)"


# ------------------------------------------------------------------------- a public prior, calibrated on public texts


def test_a_prior_divides_by_the_usual_scores_of_public_texts_which_are_asked_once(server: Server) -> None:
    """Red and Blue alike over the public texts; the geometric mean of .6 and .15 is .3, of .1 and .4 is .2."""
    server.table = SIMPLE
    replies = iter([SIMPLE[""], {" Red": 0.6, " Blue": 0.1, " x": 0.3}, {" Blue": 0.4, " Red": 0.15, " x": 0.45}])
    answered = server.greedy
    server.greedy = lambda table, body: answered({"": next(replies, SIMPLE[""])}, body)  # type: ignore[method-assign]
    prior = LabelScorer(completion(server), ["Red", "Blue"], content_free=["N/A", "none"]).prior(["one", "two"])
    wanted = normalised({"Red": 0.5 / 0.3, "Blue": 0.3 / 0.2})
    assert prior.invoke({"input": "a query", "examples": [{"text": SECRET, "label": "Red"}]}) == wanted
    assert [request["prompt"][0].rsplit("Input: ", 1)[1] for request in server.requests] == [
        "a query\nLabel:", "one\nLabel:", "two\nLabel:"
    ]  # fmt: skip
    assert asyncio.run(prior.ainvoke({"input": "another"})) == wanted
    assert len(server.requests) == 4, "the public texts were asked before"
    assert SECRET not in json.dumps(server.requests), "a prior sees no example"


def test_a_prior_serves_a_vote_and_its_texts_tell_priors_apart(server: Server) -> None:
    """The model says Red to everything, to this query less so than to others: the prior says Blue."""
    server.table = {"": {" Red": 0.7, " Blue": 0.3}}
    server.free = {"": {" Red": 0.9, " Blue": 0.1}}
    scorer = LabelScorer(completion(server), ["Red", "Blue"])
    prior = scorer.prior(["N/A and so on"])
    vote = NoisyVote(["Red", "Blue"], prior=prior).under("vote", Crowd(10, 10.0))
    bound = vote.prepare({"input": "x"}, {}, [prior.invoke({"input": "x"})])
    assert bound.aggregate([], 0.05, SecureRandomness()) == "Blue"
    assert vote.variant != NoisyVote(["Red", "Blue"], prior=scorer.prior(["N/A"])).variant


@pytest.mark.parametrize("texts", [[], "a text", ["a", " "], ["a", 1], None])
def test_public_texts_are_texts(server: Server, texts: Any) -> None:
    with pytest.raises(InvalidParameter, match="public_texts"):
        LabelScorer(completion(server), ["Red", "Blue"]).prior(texts)
