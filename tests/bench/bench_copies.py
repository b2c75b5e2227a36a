"""What a copy of a chain costs: the CPU time of twenty, which a release of twenty calls makes, beside their limits; and
the memory of fifty requests at once, of ten calls each."""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any, TypedDict

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from langchain_dpicl.private.copy import Pristine

COPIES, REQUESTS, CALLS = 20, 50, 10
LABELS = ["red", "blue"]


class State(TypedDict, total=False):
    question: str
    answer: str


def cleaned(text: str) -> str:
    return next((label for label in LABELS if label in text.casefold()), text)


def chains() -> dict[str, tuple[Any, float]]:
    """Chains of four shapes, and the milliseconds that twenty copies may take."""
    from langchain.agents import create_agent
    from langgraph.graph import START, StateGraph

    llm = ChatOpenAI(model="none", api_key=SecretStr("none"))
    plain = ChatPromptTemplate.from_messages([("system", "{examples}"), ("human", "{input}")]) | llm | StrOutputParser()
    lambdas = RunnablePassthrough.assign(shown=lambda values: str(values["examples"])) | plain | RunnableLambda(cleaned)

    def answer(state: State) -> State:
        return {"answer": cleaned(llm.invoke(state["question"]).text)}

    @tool
    def search(text: str) -> str:
        """Search."""
        return cleaned(text)

    graph = StateGraph(State).add_node("answer", answer).add_edge(START, "answer").compile()
    return {
        "plain LCEL": (plain, 2.0),
        "LCEL with lambdas": (lambdas, 8.0),
        "a graph": (graph, 20.0),
        "an agent": (create_agent(llm, [search]), 60.0),
    }


def resident() -> float:
    """The process's memory, in megabytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def memory(chain: Any) -> float:
    """Megabytes that fifty requests take while all of their calls are under way, each in a thread with its copy."""
    pristine, gate = Pristine((chain,)), threading.Barrier(REQUESTS * CALLS + 1)

    def call() -> None:
        held = pristine.copy()
        gate.wait()
        gate.wait()
        del held

    gc.collect()
    before = resident()
    threads = [threading.Thread(target=call) for _ in range(REQUESTS * CALLS)]
    for thread in threads:
        thread.start()
    gate.wait()
    found = resident() - before
    gate.wait()
    for thread in threads:
        thread.join()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    options = parser.parse_args()
    rows: dict[str, dict[str, float]] = {}
    for name, (chain, limit) in chains().items():
        pristine, times = Pristine(chain), list[float]()
        for _ in range(15):
            begun = time.process_time()
            for _ in range(COPIES):
                pristine.copy()
            times.append(1000.0 * (time.process_time() - begun))
        took = statistics.median(times)
        rows[name] = {"milliseconds": round(took, 2), "limit": limit, "ratio": round(took / limit, 3)}
        rows[name] |= {"bytes": pristine.size, "megabytes": round(memory(chain), 1)}
    if options.json:
        print(json.dumps(rows))
    else:
        for name, row in rows.items():
            at_once = f"{REQUESTS} requests at once take {row['megabytes']} MB"
            print(f"{COPIES} copies of {name}: {row['milliseconds']} ms of CPU, {row['ratio']} of the limit; {at_once}")
    return int(any(row["ratio"] > 1.0 for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
