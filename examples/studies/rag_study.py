"""RAG over documents of many owners: what each way to answer costs, beside the app without privacy and no documents.

``python examples/studies/rag_study.py --data TRAIN --settings FILE --kept FOLDER --output FOLDER``

For data that are public in truth (E2E): each output is a document with an owner of its own. The first records are the
owners', the last are public texts, by which the gate finds its bar; settings are chosen on those between, with other
wordings of the questions (``--develop``). What the model says of single documents, and finished answers, are kept in a
folder, so that a study that was stopped goes on where it was. It writes ``results.json``, ``table.md`` and a picture.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from batched_logits import BatchedLogits
from gated_study import command_of
from langchain_core.embeddings import Embeddings
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore
from numpy.typing import NDArray
from rag_questions import DEVELOP, KINDS, TEST, Fact, Texts, facts_of, field_of
from rag_report import report
from tqdm import tqdm

from langchain_dpicl import CandidateVote, DPSampler, EmbeddingMean, ExemplarStore, PrivacyBudget
from langchain_dpicl.aggregators import Aggregator
from langchain_dpicl.decoding.backends.transformers_model import TransformersLogits
from langchain_dpicl.decoding.model import attempt
from langchain_dpicl.errors import DPICLError, PrivacyWarning
from langchain_dpicl.lab.evaluation.passes import PassFile, key_of
from langchain_dpicl.local import local_embeddings
from langchain_dpicl.once.collection import release_collection
from langchain_dpicl.privacy import LineRequest, PrivacyPlan
from langchain_dpicl.privacy.choice import Crowd
from langchain_dpicl.privacy.noise import SecureRandomness
from langchain_dpicl.release.threshold import ShareThreshold
from langchain_dpicl.selection import PoissonExampleSelector
from langchain_dpicl.store.datafile import read_records

STOP = "\n."
AHEAD = 7
DECIDE = (
    *("owners", "public", "calls", "tokens", "samples"),
    *("max_tokens", "top_k", "kappa", "epsilon", "delta"),
)
"""The settings that kept answers depend on."""


class Remembered(Embeddings):
    """Another model's vectors, each made once."""

    def __init__(self, embeddings: Embeddings) -> None:
        self._embeddings, self.known = embeddings, dict[str, list[float]]()

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """One after the other."""
        return list(map(self.embed_query, texts))

    def embed_query(self, text: str) -> list[float]:
        """A text's vector."""
        if text not in self.known:
            self.known[text] = self._embeddings.embed_query(text)
        return self.known[text]


class Study:
    """The documents, the questions, and every way to answer them. ``model`` makes a `BatchedLogits`."""

    def __init__(
        self,
        records: Sequence[Mapping[str, str]],
        settings: Mapping[str, Any],
        folder: Path,
        embeddings: Embeddings,
        model: Callable[[], BatchedLogits],
        develop: bool = False,
    ) -> None:
        self.settings, self._folder, self._model = settings, folder, cache(model)
        self.embeddings = Remembered(embeddings)
        owners, public = settings["owners"], records[-settings["public"] :]
        private = records[owners : -settings["public"]] if develop else records[:owners]
        self.documents = [record["output"] for record in private]
        self._vectors = self._embedded(self.documents)
        texts = [record["output"] for record in public]
        self._embedded(texts)
        shares = {name: settings[name]["share"] for name in ("calls", "tokens")}
        self.gates = {name: ShareThreshold(self.embeddings, texts, share) for name, share in shares.items()}
        self.near = sorted({field_of(record, "near") for record in records} - {""})
        self.names = sorted({field_of(record, "name") for record in records})
        facts = facts_of(private, self.near, settings["least"])[:: settings["every"] if develop else 1]
        wordings = DEVELOP if develop else TEST
        self.questions = [(fact, each.format(fact.name)) for fact in facts for each in wordings[fact.kind]]
        folder.mkdir(parents=True, exist_ok=True)
        self.file = PassFile(folder / "answers.jsonl", {name: settings[name] for name in DECIDE})

    def _embedded(self, texts: Texts) -> NDArray[np.float32]:
        path = self._folder / f"vectors-{key_of(chr(10).join(texts))}.npy"
        if not path.exists():
            shown = tqdm(texts, desc="embedded", unit="text", disable=None, file=sys.stderr)
            self._folder.mkdir(parents=True, exist_ok=True)
            np.save(path, np.array([self.embeddings.embed_query(text) for text in shown], np.float32))
        vectors: NDArray[np.float32] = np.load(path)
        self.embeddings.known.update(zip(texts, vectors.tolist(), strict=True))
        return vectors

    # -- the app ------------------------------------------------------------------------------------------------------

    @cached_property
    def collection(self) -> InMemoryVectorStore:
        """All documents, each with its owner."""
        made = InMemoryVectorStore(self.embeddings)
        for i, (text, vector) in enumerate(zip(self.documents, self._vectors, strict=True)):
            made.store[str(i)] = {"id": str(i), "text": text, "metadata": {"owner": str(i)}, "vector": vector}
        return made

    @cached_property
    def store(self) -> ExemplarStore:
        """The same documents as private exemplars."""
        return ExemplarStore.from_vectorstore(self.collection, owner_key="owner")

    def written(self, prompts: Texts) -> list[str]:
        """The model's answers to prompts, without sampling; each is asked once, and kept."""
        fresh = [prompt for prompt in dict.fromkeys(prompts) if ("prompt", key_of(prompt)) not in self.file]
        if fresh:
            pairs = [(each[: (at := each.index("Question:"))], each[at:]) for each in fresh]
            for prompt, answer in zip(
                fresh, self._model().greedy(pairs, self.settings["max_tokens"], STOP), strict=True
            ):
                self.file.add(("prompt", key_of(prompt)), answer)
        return [self.file["prompt", key_of(prompt)] for prompt in prompts]

    def plain(self, collection: InMemoryVectorStore, k: int, question: str) -> str:
        """What an ordinary chain answers from a collection."""
        return app(collection, k, lambda prompt: self.written([prompt])[0]).invoke(question)

    # -- wrap_rag -----------------------------------------------------------------------------------------------------

    @cached_property
    def candidates(self) -> list[str]:
        """Public answers: every place and kind."""
        return [*self.near, *KINDS]

    def selector(self, of: str) -> PoissonExampleSelector:
        """Owners behind the gate of "calls" or "tokens"."""
        calls, eligible = (self.settings[of][name] for name in ("rows", "eligible"))
        how: dict[str, Any] = {"threshold": self.gates[of], "eligible": eligible, "nearest_to": "question"}
        return PoissonExampleSelector(self.store, calls=calls, pad_to=1, **how)

    def rate(self, of: str) -> float:
        """An owner's chance to take part."""
        return min(1.0, float(self.settings[of]["rows"] / self.settings[of]["eligible"]))

    def calls(self, question: str) -> list[list[str]]:
        """The prompts of the calls of some samples, one for each owner; the samples are drawn once, and kept."""
        key = ("sample", key_of(question))
        if key not in self.file:
            selector = self.selector("calls")
            query = selector.embed_query({"question": question})
            samples = [selector.sample(query=query) for _ in range(self.settings["samples"])]
            place, text = {text: i for i, text in enumerate(self.documents)}, self.store.input_key
            self.file.add(key, [[place[bucket[0][text]] for bucket in sample] for sample in samples])
        return [[f"Document: {self.documents[i]}\n\n{ask(question)}" for i in sample] for sample in self.file[key]]

    def read_ahead(self, questions: Texts) -> None:
        """Have the model write what single documents, and none, make it answer to these: many at once take less."""
        prompts = [prompt for question in questions for sample in self.calls(question) for prompt in sample]
        nearest = [shown(self.collection.similarity_search(question, k=1)) for question in questions]
        self.written([*prompts, *map(str.__add__, nearest, map(ask, questions)), *map(ask, questions)])

    @cached_property
    def aggregators(self) -> list[Aggregator[str]]:
        """Both ways to choose a candidate."""
        crowd = Crowd.of(1, self.rate("calls"), self.settings["calls"]["eligible"], self.settings["calls"]["rows"])
        found: list[Aggregator[str]] = [
            CandidateVote(self.embeddings, self.candidates),
            EmbeddingMean(self.embeddings, self.candidates),
        ]
        return [each.prepare({}, {}).under(each.mechanism, crowd) for each in found]

    def facts(self) -> dict[str, Any]:
        """Settings and public numbers for the report."""
        noises = {
            type(each).__name__: [self.noise(each, n) for n in self.settings["plans"]] for each in self.aggregators
        }
        rate, tokens = self.rate("tokens"), self.settings["max_tokens"]
        passages = [self.settings["passages"]] if self.settings["passages"] else []
        bounds = [solved(*self.promise, "tokens", rate, n * tokens) for n in (*self.settings["plans"], *passages)]
        return {**self.settings, "noise": {**noises, "tokens": bounds}, "values": [len(self.near), len(KINDS)]}

    def noise(self, aggregator: Aggregator[str], plan: int) -> float:
        """Of a plan for so many questions, or tickets."""
        options = {**aggregator.options, "own_calls": 1.0}
        return solved(*self.promise, aggregator.mechanism, self.rate("calls"), plan, tuple(options.items()))

    @property
    def promise(self) -> tuple[float, float]:
        """Epsilon and delta."""
        return self.settings["epsilon"], self.settings["delta"]

    def chosen(self, fact: Fact, samples: list[list[str]]) -> dict[str, float]:
        """How often each aggregator chooses the right candidate, with each plan's noise and with next to none."""
        found = {}
        for aggregator in self.aggregators:
            encoded = cache(partial(attempt, aggregator.encode))
            outputs = [[encoded(answer) for answer in sample] for sample in samples]
            noises = {str(plan): self.noise(aggregator, plan) for plan in self.settings["plans"]}
            noises["no noise"] = 1e3 if isinstance(aggregator, CandidateVote) else 1e-3
            for plan, noise in noises.items():
                drawn = [aggregator.aggregate(sample, noise, Quick()) for sample in outputs * self.settings["draws"]]
                found[f"{type(aggregator).__name__}, {plan}"] = float(
                    np.mean([fact.score(each or "") for each in drawn])
                )
        return found

    # -- tokens -------------------------------------------------------------------------------------------------------

    def sampler(self, ledger: Path, releases: int, tickets: bool = False) -> DPSampler:
        """The sampler over documents, with a budget of its own for so many answers."""
        tokens, name = self.settings["max_tokens"], ledger.stem
        budget = PrivacyBudget(
            *self.promise, releases * tokens, f"sqlite:///{ledger}", name, tickets=tickets, accept_noise=True
        )
        settings: dict[str, Any] = {
            "max_tokens": tokens,
            "stop": tuple(STOP),
            "top_k": self.settings["top_k"],
            "pad": False,
        }
        selector = self.selector("tokens")
        settings |= {"shots": self.settings["kappa"], "question_tokens": 32, "return_receipt": False}
        return DPSampler.over_documents(self._model(), selector, budget, **settings)

    @cached_property
    def samplers(self) -> dict[int, list[Any]]:
        """By plan: a sampler, and how many answers its budget has left."""
        return {plan: [None, 0] for plan in self.settings["token_plans"]}

    def drawn(self, question: str, plan: int, folder: Path) -> str:
        """An answer on a budget for so many; the next budget begins when one is spent."""
        key = ("tokens", plan, key_of(question))
        if key not in self.file:
            sampler, left = self.samplers[plan]
            if not left:
                ledger = folder / f"plan-{plan}-{len(list(folder.glob('*.db')))}.db"
                sampler, left = self.sampler(ledger, plan), plan
            self.file.add(key, sampler.invoke({"question": question}))
            self.samplers[plan] = [sampler, left - 1]
        answer: str = self.file[key]
        return answer

    # -- the released collection --------------------------------------------------------------------------------------

    @cached_property
    def _writer(self) -> DPSampler:
        return self.sampler(self._folder / "collection.db", self.settings["passages"], tickets=True)

    def released(self, names: Texts) -> InMemoryVectorStore:
        """Passages on these names, each owner in so many of all at most. What was written is not written again."""
        topics = [each.format(name) for name in names for kind in DEVELOP for each in DEVELOP[kind]]
        into = InMemoryVectorStore(self._writer.store.embeddings)  # by passages, as they were measured
        return release_collection(self._writer, topics, into=into, output=self._folder / "passages.jsonl")

    # -- all ----------------------------------------------------------------------------------------------------------

    def scores(self) -> list[dict[str, Any]]:
        """For each question its scores by method."""
        rows, before = [], ""
        shown = tqdm(self.questions, desc="answered", unit="question", disable=None, file=sys.stderr)
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", PrivacyWarning
            )  # each plan is measured by itself, and their sum is not used
            for number, (fact, question) in enumerate(shown):
                if not number % AHEAD:
                    self.read_ahead([each for _, each in self.questions[number : number + AHEAD]])
                if self.settings["passages"] and fact.name != before:  # while the model knows the name's documents
                    self.released([fact.name])
                before = fact.name
                samples, answers = [self.written(sample) for sample in self.calls(question)], {}
                for plan in self.settings["token_plans"]:
                    answers[f"over_documents, {plan}"] = self.drawn(question, plan, Path(folder))
                for k in self.settings["k"]:
                    answers[f"all documents, {k}"] = self.plain(self.collection, k, question)
                answers["no documents"] = self.written([ask(question)])[0]
                right = {name: fact.score(answer) for name, answer in answers.items()} | self.chosen(fact, samples)
                stated = [fact.score(each) for sample in samples for each in sample]
                right["single calls"] = float(np.mean(stated or [0.0]))
                rows.append({"name": fact.name, "kind": fact.kind, "right": fact.right, "scores": right})
            if self.settings["passages"]:
                released = self.released(self.names)
                for row, (fact, question) in zip(rows, self.questions, strict=True):
                    row["scores"]["release_collection"] = fact.score(self.plain(released, 1, question))
        return rows


class Quick(SecureRandomness):
    """Gaussian noise of so large a scale that whole numbers make no difference, in a hundredth of the time."""

    def discrete_gaussian(self, sigma: float, count: int) -> NDArray[np.int64]:
        """Rounded normal numbers."""
        return np.rint(np.random.default_rng().normal(0.0, sigma, count)).astype(np.int64)


@cache
def solved(
    epsilon: float, delta: float, mechanism: str, rate: float, count: int, options: tuple[tuple[str, float], ...] = ()
) -> float:
    """The parameter of a plan of one line."""
    request = LineRequest(mechanism, rate, count, options=dict(options))
    return PrivacyPlan.alone(request, epsilon=epsilon, delta=delta).parameter


def app(collection: InMemoryVectorStore, k: int, answer: Callable[[str], str]) -> Runnable[str, str]:
    """An ordinary retrieval chain on a model."""
    prompt = PromptTemplate.from_template("{context}Question: {question}\nAnswer:")
    found = collection.as_retriever(search_kwargs={"k": k}) | shown
    llm: Runnable[Any, str] = RunnableLambda(lambda prompt: answer(prompt.to_string()))
    return {"context": found, "question": RunnablePassthrough()} | prompt | llm


def ask(question: str) -> str:
    """The end of every prompt."""
    return f"Question: {question}\nAnswer:"


def shown(documents: Sequence[Any]) -> str:
    """Retrieved documents in a prompt."""
    return "".join(f"Document: {each.page_content}\n\n" for each in documents)


def main(argv: Sequence[str] | None = None) -> int:
    """Answer what is missing, and report."""
    parser = argparse.ArgumentParser(prog="python examples/studies/rag_study.py", description=__doc__)
    parser.add_argument("--data", required=True, help="records of E2E: input, output")
    parser.add_argument("--settings", required=True, type=Path, help="a JSON file")
    parser.add_argument(
        "--kept", required=True, type=Path, help="a folder for answers and vectors, NOT to be published"
    )
    parser.add_argument("--output", required=True, type=Path, help="a folder for the report")
    parser.add_argument("--develop", action="store_true", help="other documents and wordings, to choose settings on")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="an embedded model or a GGUF file")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object")
    options = parser.parse_args(argv)
    given = sys.argv[1:] if argv is None else argv
    try:
        settings, records = json.loads(options.settings.read_text("utf-8")), read_records(options.data)
        model = TransformersLogits(options.model, threads=options.threads)
        study = Study(
            records, settings, options.kept, local_embeddings(), partial(BatchedLogits, model), options.develop
        )
        command = shlex.join(command_of("rag_study.py", given))
        results = report(study.scores(), study.facts() | {"command": command}, options.output)
    except DPICLError as error:
        print(f"rag_study: {error}", file=sys.stderr)
        return 1
    print(json.dumps(results, indent=2) if options.json else results["table"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
