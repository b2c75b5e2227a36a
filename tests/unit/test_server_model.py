"""The backend on completion servers: llama.cpp's and vLLM's shapes, and the servers that it refuses."""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from langchain_dpicl.decoding.backends.server_model import ServerLogits
from langchain_dpicl.decoding.model import Demonstration
from langchain_dpicl.errors import InvalidParameter, ModelUnavailable, UnsafeConfigurationError

VOCABULARY = 130  # characters by their codes; 128 begins a text and 129 ends it
SECRET = "Mrs Alder of 9 Elm Street"


def log_probabilities(prompt: list[int]) -> Any:
    """A distribution that every token of the prompt moves."""
    scores = np.sin(np.arange(VOCABULARY) * (1.0 + sum((i + 1) * token for i, token in enumerate(prompt)) % 97))
    return scores - np.log(np.exp(scores).sum())


def is_secret(request: dict[str, Any]) -> bool:
    """Whether a completion's prompt holds the secret."""
    prompt = request.get("prompt")
    return isinstance(prompt, list) and SECRET in "".join(map(chr, prompt))


class FakeServer:
    """A completion server in the shape of llama.cpp's or vLLM's, with a fault if a test wants one."""

    def __init__(self, shape: str, fault: str) -> None:
        self.shape, self.fault = shape, fault
        self.requests: list[tuple[str, dict[str, Any]]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer({})

            def do_POST(self) -> None:
                self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def answer(self, request: dict[str, Any]) -> None:
                outer.requests.append((self.path, request))
                try:
                    status, made = outer.respond(self.path, request, self.headers.get("Authorization"))
                except ConnectionAbortedError:
                    self.close_connection = True
                    return
                body = json.dumps(made).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"

    def respond(self, path: str, request: dict[str, Any], authorization: str | None) -> tuple[int, Any]:
        llama = self.shape == "llama.cpp"
        if authorization != "Bearer key":
            return 401, {"error": "no"}
        if self.fault.endswith("on a secret") and is_secret(request):
            if status := next((int(word) for word in self.fault.split() if word.isdigit()), 0):
                return status, {"error": f"cannot read {request}"}
            if self.fault.startswith("hangs up"):
                raise ConnectionAbortedError
            if self.fault.startswith("no object"):
                return 200, [f"cannot read {request}"]
        if path == "/v1/models":
            facts = {"meta": {"n_vocab": VOCABULARY, "n_ctx": 64}} if llama else {"max_model_len": 64}
            return 200, {"data": [{"id": "other", "max_model_len": 7}, {"id": "tiny", **facts}]}
        if path == "/tokenize":
            text = request["content" if llama else "prompt"]
            special = request["add_special" if llama else "add_special_tokens"]
            tokens = [129] if text == "<end>" else [ord(character) for character in text]
            return 200, {"tokens": [128] * bool(special) + tokens}
        if path == "/detokenize":
            return 200, {"content" if llama else "prompt": "".join(map(chr, request["tokens"]))}
        if path == "/v1/completions":
            return 200, {"choices": [{"logprobs": self.scores(request)}]}
        return 404, {}

    def scores(self, request: dict[str, Any]) -> Any:
        values = log_probabilities(request["prompt"])
        if self.fault == "remembers":
            values = values + 1e-6 * len(self.requests)
        if self.fault == "does not add up":
            values = values - 1.0
        few = "likeliest five" in self.fault and (not self.fault.endswith("on a secret") or is_secret(request))
        asked = 5 if few else request["logprobs"]
        order = [int(token) for token in np.argsort(-values)[:asked]]
        if self.shape == "llama.cpp":
            top = [{"id": token, "token": "x", "logprob": float(values[token])} for token in order]
            return {"content": [{**top[0], "top_logprobs": top}]}
        if self.fault == "texts instead of ids":
            return {"top_logprobs": [{chr(token): float(values[token]) for token in order}]}
        assert request["return_tokens_as_token_ids"]
        return {"top_logprobs": [{f"token_id:{token}": float(values[token]) for token in order}]}


@pytest.fixture
def serve() -> Iterator[Callable[..., FakeServer]]:
    running: list[FakeServer] = []

    def start(shape: str = "llama.cpp", fault: str = "") -> FakeServer:
        running.append(FakeServer(shape, fault))
        return running[-1]

    yield start
    for server in running:
        server.http.shutdown()
        server.http.server_close()


def connect(server: FakeServer, **settings: Any) -> ServerLogits:
    size = {} if server.shape == "llama.cpp" else {"vocabulary": VOCABULARY}
    return ServerLogits(server.url, "tiny", ["<end>"], **{"api_key": "key", **size, **settings})


@pytest.mark.parametrize("shape", ["llama.cpp", "vLLM"])
def test_every_row_is_the_servers_distribution_after_that_rows_prompt(
    serve: Callable[..., FakeServer], shape: str
) -> None:
    logits = connect(serve(shape))
    some = [Demonstration(i, text) for i, text in enumerate(["one\n", "two two\n", ""])]
    session = logits.session("ask:", some, steps=5)
    for rows, released in [([], []), ([1, 0], [72]), ([2, 1], [72, 105])]:
        found = session.logits(rows, released)
        prompts = [[128, *map(ord, text + "ask:"), *released] for text in ["", *(some[row].text for row in rows)]]
        np.testing.assert_allclose(found, [log_probabilities(prompt) for prompt in prompts], atol=1e-6)
        assert found.dtype == np.float32
        assert found.shape == (1 + len(rows), VOCABULARY)
    session.close()
    assert (logits.vocabulary, logits.end_tokens, logits.name) == (VOCABULARY, {129}, "server:tiny:130")
    assert logits.text([72, 105, 129]) == "Hi"
    assert logits.text([129]) == ""
    assert logits.fits("a" * 50, "b" * 10, 3)
    assert not logits.fits("a" * 50, "b" * 10, 4)
    with pytest.raises(InvalidParameter, match="steps=60"):
        logits.session("ask:", [], steps=60)


def test_requests_reuse_nothing_that_was_cached_for_others(serve: Callable[..., FakeServer]) -> None:
    server = serve()
    connect(server).session("ask:", [Demonstration(0, "one")], steps=5).logits([0], [])
    asked = [request for path, request in server.requests if path == "/v1/completions"]
    assert all(request["cache_prompt"] is False and request["max_tokens"] == 1 for request in asked)
    assert len({request["cache_salt"] for request in asked}) == len(asked)


@pytest.mark.parametrize(
    ("shape", "fault"),
    [
        ("llama.cpp", "likeliest five"),
        ("vLLM", "likeliest five"),
        ("vLLM", "texts instead of ids"),
        ("llama.cpp", "does not add up"),
    ],
)
def test_a_server_that_does_not_show_the_whole_distribution_is_refused(
    serve: Callable[..., FakeServer], shape: str, fault: str
) -> None:
    with pytest.raises(InvalidParameter, match="every token") as caught:
        connect(serve(shape, fault))
    assert caught.value.parameter == "base_url"


def test_a_vocabulary_that_is_not_the_servers_is_refused(serve: Callable[..., FakeServer]) -> None:
    for wrong in (VOCABULARY - 1, VOCABULARY + 1):
        with pytest.raises(InvalidParameter, match="every token"):
            connect(serve("vLLM"), vocabulary=wrong)


def test_a_server_whose_answers_depend_on_what_it_was_asked_before_is_refused(
    serve: Callable[..., FakeServer],
) -> None:
    with pytest.raises(UnsafeConfigurationError, match="earlier requests"):
        connect(serve("llama.cpp", "remembers"))


def test_what_a_server_does_not_say_must_be_said(serve: Callable[..., FakeServer]) -> None:
    with pytest.raises(InvalidParameter, match="vocabulary=None"):
        connect(serve("vLLM"), vocabulary=None)
    with pytest.raises(InvalidParameter, match="end_tokens='<eos>'"):
        ServerLogits(serve().url, "tiny", ["<eos>"], api_key="key")


@pytest.mark.parametrize(
    ("settings", "parameter"),
    [
        ({"base_url": "tiny"}, "base_url"),
        ({"model": ""}, "model"),
        ({"vocabulary": 0}, "vocabulary"),
        ({"context": True}, "context"),
    ],
)
def test_a_parameter_outside_its_bounds_is_named(settings: dict[str, Any], parameter: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        ServerLogits(**{"base_url": "http://127.0.0.1:9/v1", "model": "tiny", "end_tokens": [], **settings})
    assert caught.value.parameter == parameter


def test_a_server_that_is_away_or_wants_another_key_is_unavailable(serve: Callable[..., FakeServer]) -> None:
    with pytest.raises(ModelUnavailable, match="no answer"):
        ServerLogits("http://127.0.0.1:9/v1", "tiny", ["<end>"])
    with pytest.raises(ModelUnavailable, match="401"):
        connect(serve(), api_key="another")


@pytest.mark.parametrize("shape", ["llama.cpp", "vLLM"])
@pytest.mark.parametrize("fault", ["400", "422", "500", "no object", "likeliest five", "hangs up"])
def test_a_prompt_that_the_server_does_not_answer_is_a_row_of_no_numbers(
    serve: Callable[..., FakeServer], shape: str, fault: str
) -> None:
    """The others are those of a server without the fault, to the last bit, for every token of the answer."""
    some = [Demonstration(0, "one\n"), Demonstration(1, SECRET), Demonstration(2, "two\n")]
    logits = connect(serve(shape, f"{fault} on a secret"))
    session = logits.session("ask:", some, steps=5)
    plain = connect(serve(shape)).session("ask:", some, steps=5)
    for rows, released in (([0, 1, 2], []), ([1], [72]), ([2, 1, 0], [72, 105])):
        found = session.logits(rows, released)
        without = plain.logits([row for row in rows if row != 1], released)
        assert np.array_equal(np.delete(found, 1 + rows.index(1), axis=0), without)
        assert np.isnan(found[1 + rows.index(1)]).all()
    assert SECRET not in repr(session) + repr(logits)


def test_a_server_that_is_away_fails_the_zero_shot_row_and_shows_nothing(serve: Callable[..., FakeServer]) -> None:
    """Also where it goes away between two rows: the rows that follow must not be taken for nothing one by one."""
    server = serve("llama.cpp")
    logits = connect(server)
    session = logits.session("ask:", [Demonstration(0, SECRET), Demonstration(1, "one")], steps=5)
    answered = server.respond

    def ends(path: str, request: dict[str, Any], authorization: str | None) -> Any:
        if is_secret(request):
            server.fault = "gone"
        if server.fault == "gone":
            raise ConnectionAbortedError
        return answered(path, request, authorization)

    server.respond = ends  # type: ignore[method-assign]
    for rows in ([0, 1], [1], []):
        with pytest.raises(ModelUnavailable) as caught:
            session.logits(rows, [])
        assert SECRET not in str(caught.value)
        assert caught.value.__cause__ is None
        assert caught.value.__context__ is None
    for thing in (logits, session):
        with pytest.raises(UnsafeConfigurationError):
            pickle.dumps(thing)
