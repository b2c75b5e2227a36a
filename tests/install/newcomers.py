"""Newcomers who follow the pages alone: the README, a classifier from a file with faults, a server, a chatbot.

``make test-newcomer`` runs the first two from the wheel, with the packages of ``.venv``; ``make test-install`` runs all
in a fresh environment. Code and commands are those of the pages. The data is made to suit the commands: files, labels
and owners as they name them. A failure names page and line.
"""

from __future__ import annotations

import json
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data import messages, written
from environment import Environment
from following import ROOT, Command, blocks, commands


def supply(place: Environment, steps: list[Command]) -> None:
    """Write the data files that commands name, with the labels and the owners' column that they name."""
    outputs = {step.option(name) for step in steps for name in ("--output", "--report") if name in step.words}
    [labels, *_] = [step.option("--labels").split(",") for step in steps if "--labels" in step.words]
    [owner_key, *_] = [step.option("--owner-key") for step in steps if "--owner-key" in step.words]
    names = {word for step in steps for word in step.words if word.endswith((".jsonl", ".csv"))}
    for seed, name in enumerate(sorted(names - outputs)):
        (place.work / name).write_text(written(messages(labels, owner_key, seed), name))


def readme(place: Environment) -> None:
    """Each program in a process of its own, without any warning; then the files that the page names are there."""
    programs = blocks("README.md", "langchain-dpicl", "python")
    for program in programs:
        told = place.follow([program])
        print("".join(f"           {line}\n" for line in told.splitlines()), end="")
    place.follow(programs[:1], code=(1,), says="PrivacyBudgetExceeded")
    for name in re.findall(r"`(\w+\.(?:db|db\.witness|npz))`", (ROOT / "README.md").read_text("utf-8")):
        if not (place.work / name).exists():
            raise SystemExit(f"README.md speaks of {name}, which its programs do not write")


def classifier(place: Environment) -> None:
    """A CSV file with faults is checked and mended; then a vote, a head, and the head's answers."""
    steps = commands("docs/quickstart.md", "Your own data")
    supply(place, steps)
    spoilt(place, steps[0])
    for step in steps:
        place.run(*step.words, place=step.place)
    place.restart()
    steps = commands("docs/tasks/classifier.md", "A head")
    supply(place, steps)
    for step in steps:
        told = place.run(*step.words, place=step.place)
    print(f"           {' '.join(told.split())[:110]}")


def spoilt(place: Environment, check: Command) -> None:
    """Let the file be as a colleague's spreadsheet writes it, with two faults: the check names their lines."""
    [name] = [word for word in check.words if word.endswith(".csv")]
    file = place.work / name
    good = file.read_text()
    rows = good.splitlines()
    rows[4] = rows[4].rpartition(",")[0]
    rows[8] = rows[8].replace("Hello", "Grüße")
    file.write_bytes("\r\n".join(rows).encode("cp1252"))
    told = place.run(*check.words, place=check.place, code=(1,))
    if not re.search(r"lines? 5\b", told) or not re.search(r"\b9\b", told):
        raise SystemExit(f"{check.place}: the check does not name the lines 5 and 9:\n{told}")
    file.write_text(good)


def server(place: Environment) -> None:
    """The configuration file of the page, with a key made as it says: checked, started, asked, and asked without it."""
    [config, *_] = blocks("docs/tasks/server.md", "Without writing code", "yaml")
    made = re.search(r"from: (dpicl serve --new-key (\w+))", config.text)
    if made is None:
        raise SystemExit(f"{config.place}: the file does not say how a key is made")
    told = place.run(*made[1].split(), place=config.place)
    key, hashed = re.findall(r"[\w-]{43,}", told)[:2]
    text = re.sub(r"0f1e\.\.\.", hashed, config.text)
    (place.work / "server.yaml").write_text(text)
    data = re.search(r"data: (\S+?)[,}]", text)
    labels = re.search(r"labels: \[(.*?)\]", text)
    assert data
    assert labels
    (place.work / data[1]).write_text(written(messages(labels[1].split(", "), "customer", customers=1_500), data[1]))
    for command in commands("docs/tasks/server.md", "Without writing code"):
        if command.words[:2] == ("dpicl", "serve") and "--check" not in command.words:
            with serving(place, command):
                print(f"           {ask(text, key)[:110]}")
        else:
            place.run(*command.words, place=command.place)


@contextmanager
def serving(place: Environment, command: Command) -> Iterator[None]:
    """Run a server while the block lasts."""
    log = place.work / "server.log"
    with (
        log.open("w") as out,
        subprocess.Popen(
            [place.bin / command.words[0], *command.words[1:]],
            cwd=place.work,
            env=place.variables(),
            stdout=out,
            stderr=out,
        ) as process,
    ):
        try:
            yield
        except SystemExit as failed:
            raise SystemExit(f"{command.place}: {failed}\n{log.read_text()[-3000:]}") from None
        finally:
            process.terminate()


def ask(config: str, key: str) -> str:
    """Ask a server of this configuration, as soon as it answers."""
    port = re.search(r"port: (\d+)", config)
    path = re.search(r"path: (/\w+)", config)
    url = f"http://127.0.0.1:{port[1] if port else 8000}{path[1] if path else '/answer'}/invoke"
    key_of_text = re.search(r"input_key: (\w+)", config)
    question = {key_of_text[1] if key_of_text else "text": "My card was charged twice: I want a refund"}
    body = json.dumps({"input": question}).encode()
    asked = urllib.request.Request(url, body, {"Content-Type": "application/json", "Authorization": f"Bearer {key}"})
    until = time.monotonic() + 300
    while True:
        try:
            with urllib.request.urlopen(asked, timeout=120) as reply:
                return str(json.load(reply)["output"])
        except urllib.error.HTTPError as refused:
            raise SystemExit(f"{url}: {refused}: {refused.read().decode()[:1000]}") from None
        except OSError as refused:
            if time.monotonic() > until:
                raise SystemExit(f"{url}: {refused}") from None
            time.sleep(0.5)


def chatbot(place: Environment) -> None:
    """The page's code, in order, with the newcomer's own chatbot for what it does not define."""
    own = str(ROOT / "tests" / "install" / "chatbot.py")
    told = place.follow(blocks("docs/tasks/rag.md", "RAG", "python"), own=own, warnings="default")
    print(f"           {told.strip()[-110:]}")


TRIALS = {"readme": readme, "classifier": classifier, "server": server, "chatbot": chatbot}
SHORT = ("readme", "classifier")


def main(names: list[str]) -> None:
    """Run these trials from the wheel, with the packages of this environment."""
    folder = Path(tempfile.mkdtemp(prefix="dpicl-newcomer-"))
    try:
        for name in names or SHORT:
            began = time.monotonic()
            used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
            place = Environment(folder, name, reuse=True)
            place.install("")
            TRIALS[name](place)
            used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - used
            print(f"{name}: {time.monotonic() - began:.0f} s ({used:.0f} s of processor)\n", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1:])
