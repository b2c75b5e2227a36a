"""What the tests of the private boundary share: secrets, members that tell them, and ears everywhere.

Every secret is a string of its own, so that a failing test says what got out. A `Told` member tells all of them by
every means that a chain has, and so does a `Babbling` model of logits. `hear` runs a channel on a Runnable and gives
what the channel was told, what the surroundings heard (logs, warnings, standard output, hooks), and the error.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import logging
import re
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from langchain_core.callbacks import (
    AsyncCallbackManagerForLLMRun,
    BaseCallbackHandler,
    CallbackManagerForLLMRun,
    adispatch_custom_event,
    dispatch_custom_event,
)
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnableParallel
from langsmith import Client, run_trees, utils
from numpy.typing import NDArray
from pydantic import Field
from table_model import TableModel

from langchain_dpicl import (
    DPAggregate,
    DPSampler,
    ExemplarStore,
    NoisyVote,
    PoissonExampleSelector,
    PrivacyBudget,
    PrivateEnsemble,
    SealedRelease,
)
from langchain_dpicl.decoding import Demonstration

QUESTION = {"input": "a witty, seductive movie"}
LABELS = ["Positive", "Negative"]

EXEMPLAR = "EXEMPLAR-canary-mrs-alder-of-9-elm-street"
OWNER = "OWNER-canary-alder"
PROMPT = "PROMPT-canary-rendered"
OUTPUT = "OUTPUT-canary-she-coughs"
FAILURE = "FAILURE-canary-cannot-read-her-file"
VOTE = "VOTE-canary"
METADATA = "METADATA-canary-request-8812"
TOKENS = 77712345
EMBEDDED = 0.7318264
SECRETS = [
    EXEMPLAR,
    OWNER,
    PROMPT,
    OUTPUT,
    FAILURE,
    VOTE,
    METADATA,
    str(TOKENS),
    str(EMBEDDED),
]
ON_THE_LATTICE = re.compile(rf"(?<![\w.]){int(EMBEDDED * (1 << 16))}(?!\w)")
"""The embedding as `EmbeddingMean` sees it: a number of its own, since ids and times hold any five digits."""

logger = logging.getLogger("a.model.client")


def found_in(text: str) -> list[str]:
    """The secrets that a text holds; words may have lost their case and hyphens (`Keywords` splits them)."""
    return [secret for secret in SECRETS if secret in text] + ON_THE_LATTICE.findall(text)


# -- the private side --------------------------------------------------------------------------------------------------


class Clinic(BaseChatModel):
    """A chat model that tells secrets in its answer, its metadata, its logs, its warnings, and its failures.

    ``fares`` is how its calls on private prompts fare: "success", "one fails", "all fail", or "hangs". What it is asked
    without examples it answers.
    """

    fares: str = "success"
    says: str = "Positive"
    calls: list[str] = Field(default_factory=list, repr=False, exclude=True)
    patience: float = 0.5

    @property
    def _llm_type(self) -> str:
        return "clinic"

    def _begin(self, messages: list[BaseMessage]) -> bool:
        text = str(messages)
        logger.debug("request %s", text)
        warnings.warn(f"a model's warning: {text} {OUTPUT}", stacklevel=1)
        private = EXEMPLAR in text
        if private:
            self.calls.append(text)
        if private and (self.fares == "all fail" or (self.fares == "one fails" and len(self.calls) == 2)):
            raise ValueError(f"{FAILURE} {text}")
        return private and self.fares == "hangs"

    def _result(self) -> ChatResult:
        message = AIMessage(
            f"{self.says} {OUTPUT}",
            usage_metadata={"input_tokens": TOKENS, "output_tokens": 1, "total_tokens": TOKENS + 1},
            response_metadata={"model_name": METADATA},
        )
        return ChatResult(generations=[ChatGeneration(message=message)], llm_output={"trace": METADATA})

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        if self._begin(messages):
            time.sleep(self.patience)
        return self._result()

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        if self._begin(messages):
            await asyncio.sleep(self.patience)
        return self._result()


def _announce(prompt: Any) -> Any:
    """A step that tells its progress as LangChain and LangGraph offer it."""
    with contextlib.suppress(Exception):
        dispatch_custom_event("progress", f"{OUTPUT} {prompt}")
    _write(prompt)
    return prompt


async def _aannounce(prompt: Any) -> Any:
    with contextlib.suppress(Exception):
        await adispatch_custom_event("progress", f"{OUTPUT} {prompt}")
    _write(prompt)
    return prompt


def _write(prompt: Any) -> None:
    from langgraph.config import get_stream_writer

    with contextlib.suppress(Exception):
        get_stream_writer()(f"{OUTPUT} {prompt}")


def a_member(model: Runnable[Any, Any]) -> Runnable[Any, Any]:
    """A prompt with the examples (and a secret that only its rendering holds), the model, a parser."""
    prompt = ChatPromptTemplate.from_messages([("human", "{stamp} {examples}\nInput: {input}\nOutput:")])
    stamped = prompt.partial(stamp=lambda: PROMPT)
    return stamped | RunnableLambda(_announce, afunc=_aannounce) | model | StrOutputParser()


def naive(member: Runnable[Any, Any]) -> Runnable[Any, Any]:
    """What one would write without the boundary: the same member, three times, in LCEL's open."""
    bucket = [{"input": EXEMPLAR, "output": "Positive"}]
    steps = RunnableParallel({f"member_{i}": member for i in range(3)})
    return RunnableLambda(lambda values: {**values, "examples": bucket}) | steps | (lambda votes: "Positive")


def secret_records(owners: int = 6) -> list[dict[str, str]]:
    return [{"input": f"text {i} {EXEMPLAR}", "output": LABELS[i % 2], "owner": f"{OWNER}-{i}"} for i in range(owners)]


def secret_store() -> ExemplarStore:
    return ExemplarStore.from_records(secret_records(), DeterministicFakeEmbedding(size=4), owner_key="owner")


class EveryBucketFull:
    """Every owner is in, one bucket after the other, so that every member's prompt is private."""

    def coin_positions(self, n: int, probability: float) -> NDArray[np.int64]:
        return np.arange(n, dtype=np.int64)

    def integers(self, high: int, size: int) -> NDArray[np.int64]:
        return np.arange(size, dtype=np.int64) % high

    def uniforms(self, size: int) -> NDArray[np.float64]:
        return np.arange(size) / max(size, 1)


class NoNoise:
    """Gaussian votes and means come out plain, also with as many releases as these tests make; words are drawn by a
    seed."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(1)

    def integers(self, high: int, size: int) -> NDArray[np.int64]:
        return self.generator.integers(high, size=size, dtype=np.int64)

    def uniforms(self, size: int) -> NDArray[np.float64]:
        return self.generator.random(size)

    def discrete_gaussian(self, sigma: float, size: int) -> NDArray[np.int64]:
        return np.zeros(size, np.int64)


def sealed_release(
    store: ExemplarStore, member: Any, aggregator: Any, budget: PrivacyBudget, members: int = 4
) -> SealedRelease:
    sealed = PrivateEnsemble(secret_selector(store, members), member) | DPAggregate(aggregator, budget)
    sealed._randomness = NoNoise()  # type: ignore[assignment]
    return sealed


def a_sampler(store: ExemplarStore, model: TableModel, budget: PrivacyBudget) -> DPSampler:
    """Every owner takes part in every token."""
    return DPSampler(model, secret_selector(store), budget, shots=6, top_k=2, max_tokens=4)


def secret_selector(store: ExemplarStore, members: int = 4) -> PoissonExampleSelector:
    selector = PoissonExampleSelector(store, members, rate=1.0, max_exemplars=6)
    selector._randomness = EveryBucketFull()  # type: ignore[assignment]
    return selector


class Babbling(TableModel):
    """A model of logits that answers "Positive", and tells of every private prompt in its logs, warnings and failures.

    ``fares`` is how its calls on private prompts fare: "success", "rows fail" or "hangs"; with "all fail" the public
    prompt fails as well, once a private one did.
    """

    def __init__(self, fares: str = "success", patience: float = 0.5) -> None:
        super().__init__(self._logits, ["Positive", "."], frozenset({1}))
        self.fares = fares
        self.patience = patience
        self.private_calls = 0

    def _logits(self, demonstration: str, released: str) -> list[float]:
        if EXEMPLAR in demonstration:
            self._tell(f"{PROMPT} {demonstration} {OUTPUT}")
        elif self.fares == "all fail" and self.private_calls:
            raise ValueError(f"{FAILURE} {EXEMPLAR}")
        return [0.0, 100.0] if released else [100.0, 0.0]

    def _tell(self, said: str) -> None:
        logger.debug("request %s", said)
        warnings.warn(f"a model's warning: {said}", stacklevel=1)
        _announce(said)
        self.private_calls += 1
        if self.fares in ("rows fail", "all fail"):
            raise ValueError(f"{FAILURE} {said}")
        if self.fares == "hangs":
            time.sleep(self.patience)

    def __repr__(self) -> str:
        return "Babbling()"

    def in_the_open(self) -> Runnable[Any, Any]:
        """What one would write without the boundary: a step that shows the model an exemplar."""
        shown = [Demonstration("key", f"{EXEMPLAR} Positive")]

        def ask(values: Any) -> str:
            logits = self.session(str(values), shown, steps=1).logits([0], [])
            return self.alphabet[int(logits.sum(axis=0).argmax())]

        return RunnableLambda(ask)


class Tally(NoisyVote):
    """A vote whose encoded outputs hold a secret."""

    def encode(self, output: object) -> object:
        return (VOTE, output, super().encode(output))

    def aggregate(self, outputs: Sequence[object], parameter: float, randomness: Any) -> Any:
        votes = [output[2] if isinstance(output, tuple) else output for output in outputs]
        return super().aggregate(votes, parameter, randomness)


class Telling(Embeddings):
    """Embeddings whose vectors of private answers show a secret number."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [self.embed_query(text) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        return [EMBEDDED, 0.1, 0.0] if OUTPUT in text else [1.0, 0.0 if "good" in text else 1.0, 0.0]


# -- the ears ----------------------------------------------------------------------------------------------------------


class Recorder(BaseCallbackHandler):
    """Keeps everything that any callback is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return object.__getattribute__(self, name)

        def keep(*args: Any, **kwargs: Any) -> None:
            self.told.append(f"{name} {args!r} {kwargs!r}")

        return keep

    def __repr__(self) -> str:
        return "Recorder()"

    def text(self) -> str:
        return "\n".join(self.told)


def every_run(run: Any) -> str:
    return f"{run.name} {run.inputs!r} {run.outputs!r} {run.events!r} {run.error!r} {run.extra!r}" + "".join(
        every_run(child) for child in run.child_runs
    )


class RecordingClient(Client):
    """A LangSmith client that keeps what it would send."""

    def __init__(self) -> None:
        super().__init__(api_url="http://localhost:1", api_key="none", auto_batch_tracing=False, info={})
        self.sent: list[str] = []

    def create_run(self, *args: Any, **kwargs: Any) -> None:
        self.sent.append(repr((args, kwargs)))

    def update_run(self, *args: Any, **kwargs: Any) -> None:
        self.sent.append(repr((args, kwargs)))


@contextlib.contextmanager
def langsmith_from_the_environment(patch: Any, **variables: str) -> Iterator[RecordingClient]:
    client = RecordingClient()
    with patch.context() as patched:
        for name, value in {"LANGSMITH_TRACING": "true", "LANGCHAIN_TRACING_V2": "true", **variables}.items():
            patched.setenv(name, value)
        patched.setattr(run_trees, "_CLIENT", client)
        utils.get_env_var.cache_clear()
        try:
            yield client
        finally:
            utils.get_env_var.cache_clear()


class _Handler(logging.Handler):
    def __init__(self, heard: list[str]) -> None:
        super().__init__(logging.NOTSET)
        self.heard = heard

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(f"{self.format(record)} {vars(record)}")


@contextlib.contextmanager
def surroundings(heard: list[str]) -> Iterator[None]:
    """Log records from DEBUG on, warnings, standard output and error, and what the hooks of last resort are told."""
    root, handler, level = logging.getLogger(), _Handler(heard), logging.getLogger().level
    output = io.StringIO()
    hooks = sys.unraisablehook, threading.excepthook

    def hook(told: Any) -> None:
        heard.append(f"hook: {told.exc_value!r} {getattr(told, 'object', None)!r}")

    loop = None
    with contextlib.suppress(RuntimeError):
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, told: heard.append(f"the loop: {told!r}"))
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    sys.unraisablehook = threading.excepthook = hook
    try:
        with (
            warnings.catch_warnings(record=True) as warned,
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
        ):
            warnings.simplefilter("always")
            yield
    finally:
        sys.unraisablehook, threading.excepthook = hooks
        root.removeHandler(handler)
        root.setLevel(level)
        if loop is not None:
            loop.set_exception_handler(None)
        heard.append(output.getvalue())
        heard += [f"{warning.message} {warning!r}" for warning in warned]


def shown_by(error: BaseException | None) -> str:
    """What an error reporter would send: the whole chain of errors, notes, arguments, and every frame's variables."""
    shown: list[str] = []
    while error is not None:
        shown += [repr(error), str(error), repr(error.args), repr(vars(error)), *traceback.format_exception(error)]
        for frame, _ in traceback.walk_tb(error.__traceback__):
            for name, value in frame.f_locals.items():
                with contextlib.suppress(Exception):  # an object that is half made may have no repr
                    shown.append(f"{frame.f_code.co_qualname} {name}={value!r}")
        error = error.__cause__ or error.__context__
    return "\n".join(shown)


@dataclass
class Heard:
    """What a channel was told, what the surroundings heard, and the error."""

    told: list[str] = field(default_factory=list)
    around: list[str] = field(default_factory=list)
    error: BaseException | None = None

    def all(self) -> str:
        return "\n".join([*self.told, *self.around, shown_by(self.error)])


Channel = Callable[[Any, list[str]], Awaitable[None]]


async def hear(channel: Channel, runnable: Any, *, cancel_when: Callable[[], Any] | None = None) -> Heard:
    """Run a channel, which adds to a list what it is told; ``cancel_when`` says when its caller gives up.

    What it leaves running is awaited, so that the next channel does not hear it.
    """
    heard = Heard()
    before = asyncio.all_tasks()
    with surroundings(heard.around):
        call = asyncio.ensure_future(channel(runnable, heard.told))
        if cancel_when is not None:
            for _ in itertools.count():
                await asyncio.sleep(0.002)
                if cancel_when() or call.done():
                    break
            call.cancel()
        try:
            await call
        except BaseException as error:
            heard.error = error
        del call
        await asyncio.sleep(0)  # let the loop report what was forgotten
        if left := asyncio.all_tasks() - before:
            await asyncio.wait(left, timeout=10)
    return heard
