"""The operations page's whole deployment, as it is written: PostgreSQL, two model servers, four workers, a proxy.

The model is the first layers of a small one: it says nothing of sense, and its calls take a tenth of the time.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from gguf import GGUFReader, GGUFWriter
from http_server import until
from ledger_files import AFTER_A_KILL
from pages import NGINX, blocks
from pgvector_server import Cluster, NoServer, ask

from langchain_dpicl import PrivacyBudget
from langchain_dpicl.local.weights import model_path
from langchain_dpicl.serving.guards import hash_of, new_key

PROXY, WORKERS, MODELS, DATABASE = "http://127.0.0.1:7100", (7101, 7102), (7201, 7202), 7132
OWNERS, ASKED, LAYERS = 400, 6, 3

LLAMA_SERVER = f"""#!{sys.executable}
# llama.cpp's server, from the package that brings it; it takes the options that the page uses, and no others.
import argparse, signal
from langchain_dpicl.extras import require

parser = argparse.ArgumentParser()
for name in ("--model", "--alias", "--host", "--api-key"):
    parser.add_argument(name, required=True)
for name in ("--port", "--ctx-size", "--parallel", "--cache-ram"):
    parser.add_argument(name, type=int, required=True)
for name in ("--no-cache-prompt", "--no-slots"):
    parser.add_argument(name, action="store_true", required=True)
given = parser.parse_args()
native = require("xllamacpp", "local")
params = native.CommonParams()
params.model.path, params.model_alias = given.model, {{given.alias}}
params.hostnames, params.port, params.api_keys = [given.host], given.port, [given.api_key]
params.n_parallel, params.n_ctx = given.parallel, given.ctx_size
params.cache_prompt, params.cache_ram_mib, params.endpoint_slots = False, given.cache_ram, False
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
params.verbosity = -1
server = native.Server(params)
signal.pause()
"""


def first_layers(model: Path, layers: int, to: Path) -> None:
    """A model of the first layers of another."""
    reader = GGUFReader(model)
    known = {field.name: field for field in reader.fields.values() if not field.name.startswith("GGUF.")}
    writer = GGUFWriter(to, known.pop("general.architecture").contents())
    for name, value in known.items():
        content = layers if name.endswith(".block_count") else value.contents()
        writer.add_key_value(name, content, value.types[0], value.types[1] if len(value.types) > 1 else None)
    for tensor in reader.tensors:
        if not tensor.name.startswith("blk.") or int(tensor.name.split(".")[1]) < layers:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@dataclass
class Deployed:
    """What runs."""

    folder: Path
    key: str
    metrics: str
    ledger: str
    session: int = 0
    numbers: list[int] = field(default_factory=list)
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=500))

    def ask(self, question: str, tries: int = 1) -> dict[str, Any]:
        """The answer, by way of the proxy; a caller asks again if a server was lost."""
        body, headers = {"input": {"text": question}}, {"authorization": f"Bearer {self.key}"}
        for _ in range(tries):
            answer = self.client.post(f"{PROXY}/route/invoke", json=body, headers=headers)
            if answer.status_code != 502:
                break
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()["output"]
        return found

    def ask_all(self, questions: list[str], tries: int = 1) -> list[dict[str, Any]]:
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(lambda question: self.ask(question, tries), questions))

    def charges(self, port: int) -> float:
        """What a server says that it charged."""
        headers = {"authorization": f"Bearer {self.metrics}"}
        text = self.client.get(f"http://127.0.0.1:{port}/metrics", headers=headers).text
        return sum(float(value) for value in re.findall(r"^dpicl_charges_total\{.*\} (\S+)$", text, re.MULTILINE))

    def process(self, *words: str) -> list[int]:
        """The deployment's own processes with all of these words in their command."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                if os.getsid(int(entry.name)) != self.session:
                    continue
                command = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if all(word in command or any(part.endswith(f"/{word}") for part in command) for word in words):
                    found.append(int(entry.name))
        return found


def workers_of(process: int) -> list[int]:
    """A process and all that it has started."""
    found = [process]
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == process:
                found += workers_of(int(entry.name))
    return found


@pytest.fixture(scope="module")
def database() -> Iterator[None]:
    """PostgreSQL as the other page makes it, on a port of its own."""
    try:
        cluster = Cluster("max_connections=60", port=DATABASE)
    except NoServer as error:
        pytest.skip(f"no pgvector: {error}")
    with contextlib.closing(cluster):
        (sql,) = blocks("postgres.md", "sql", "")
        roles, _, extension = sql.partition("\\connect records\n")
        ask(cluster.url, *filter(str.strip, roles.split(";")))
        ask(cluster.url.replace("/postgres?", "/records?"), extension)
        yield


@pytest.fixture(scope="module")
def deployed(database: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    if shutil.which("nginx") is None:
        pytest.skip("no nginx")
    folder, key, metrics = tmp_path_factory.mktemp("deployed"), new_key(), new_key()
    (settings,), (proxy,) = (blocks("operations.md", each, "A whole deployment") for each in ("yaml", "nginx"))
    (models,) = blocks("operations.md", "nginx", "Members over several servers")
    (start,) = blocks("operations.md", "sh", "A whole deployment")
    rows = [
        {"text": f"box {i} of the {'kitchen' if i % 3 else 'garden'}", "label": "Flask" if i % 3 else "Porch"}
        for i in range(OWNERS)
    ]
    lines = [json.dumps({**row, "patient": f"p{i}"}) for i, row in enumerate(rows)]
    files = {
        "server.yaml": settings,
        "proxy.conf": proxy,
        "models.conf": models,
        "nginx.conf": NGINX,
        "llama-server": LLAMA_SERVER,
    }
    files |= {"keys.yaml": json.dumps({"desk": hash_of(key)}), "notes.jsonl": "\n".join(lines)}
    for name, content in files.items():
        (folder / name).write_text(content)
    (folder / "llama-server").chmod(stat.S_IRWXU)
    first_layers(model_path("smollm2-135m-instruct"), LAYERS, folder / "model.gguf")
    around = {
        **os.environ,
        "PATH": os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "STORE_URL": f"postgresql://dpicl:...@127.0.0.1:{DATABASE}/records",
        "LEDGER_URL": f"postgresql://dpicl:...@127.0.0.1:{DATABASE}/budgets",
        "MODEL_KEY": "a key",
        "METRICS_KEY_HASH": hash_of(metrics),
    }
    found = Deployed(folder, key, metrics, around["LEDGER_URL"])
    with (folder / "log").open("wb") as log:
        how: dict[str, Any] = {"cwd": folder, "env": around, "stdout": log, "stderr": log, "start_new_session": True}
        process = subprocess.Popen(["bash", "-ec", start], **how)
        found.session = process.pid
        try:
            said = (folder / "log").read_text
            assert process.wait(600) == 0, said()
            for port in WORKERS:
                until(lambda: ready(port), 300)  # noqa: B023
            yield found
        finally:
            for pid in found.process("llama-server") + found.process("serve", "server.yaml"):
                for each in workers_of(pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(each, signal.SIGKILL)
            if (folder / "nginx.pid").exists():
                os.kill(int((folder / "nginx.pid").read_text()), signal.SIGTERM)


def ready(port: int) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"http://127.0.0.1:{port}/ready", timeout=30).status_code == 200
    return False


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(1500)
@pytest.mark.filterwarnings(AFTER_A_KILL)
def test_the_deployment_answers_and_goes_on_when_a_part_of_each_kind_is_lost(deployed: Deployed) -> None:
    assert deployed.client.get(f"{PROXY}/metrics").status_code == 404
    first = [f"which room, asks {i}?" for i in range(ASKED)]
    answers = deployed.ask_all(first)
    numbers = [each["receipt"]["number"] for each in answers]
    assert sorted(numbers) == list(range(1, ASKED + 1))
    shares = [deployed.charges(port) for port in WORKERS]
    assert sum(shares) == ASKED
    assert min(shares) > 0, "the proxy asks both"

    (gone,) = deployed.process("dpicl", "--port", str(WORKERS[0]))
    (model,) = deployed.process("llama-server", "--port", str(MODELS[0]))
    then = [f"and which room, asks {i}?" for i in range(ASKED)]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(deployed.ask_all, then, 5)
        until(lambda: deployed.charges(WORKERS[1]) > shares[1], 300)
        for each in [model, *workers_of(gone)]:
            os.kill(each, signal.SIGKILL)
        later = asked.result()
    numbers += [each["receipt"]["number"] for each in later]
    assert len(set(numbers)) == 2 * ASKED
    assert all(ready(port) == (port == WORKERS[1]) for port in WORKERS)
    assert [each["receipt"]["replayed"] for each in deployed.ask_all(first)] == [True] * ASKED
    assert [each["answer"] for each in deployed.ask_all(first)] == [each["answer"] for each in answers]

    (left,) = deployed.process("dpicl", "--port", str(WORKERS[1]))
    os.kill(left, signal.SIGTERM)
    until(lambda: not Path(f"/proc/{left}").exists() or "Z" in Path(f"/proc/{left}/stat").read_text().split()[2], 60)
    budget = PrivacyBudget.open("notes", deployed.ledger)
    rows, count = budget.latest()
    assert {row.number for row in rows if row.receipt} >= set(numbers)
    in_vain = count - 2 * ASKED  # the dead server had charged them, for callers who then asked again
    assert 0 <= in_vain <= ASKED
    assert budget.spent() == count, "each row is one release"
    budget.close()
