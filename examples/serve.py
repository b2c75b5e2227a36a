"""Serve private answers over HTTP to callers who each have a budget of their own, and ask as one of them.

`dpicl serve --config FILE` does the same from a configuration file, with hashed keys, several workers and a page.
"""

import hmac
import threading
import time

import httpx
import uvicorn
from fastapi import FastAPI, Request

from langchain_dpicl import (
    DPAggregate,
    ExemplarStore,
    LabelScorer,
    NoisyVote,
    PoissonExampleSelector,
    PrivacyBudget,
    PrivateEnsemble,
    add_dp_routes,
)
from langchain_dpicl.demo.inbox import DEMO_CONTENT_FREE, DEMO_LABELS, demo_inbox
from langchain_dpicl.local import local_embeddings, local_llm
from langchain_dpicl.serving.guards import new_key

KEYS = {"front-desk": new_key(), "night-shift": new_key()}  # yours come from where you keep secrets


def caller(request: Request) -> str | None:
    """Whose key it is; None means 401."""
    given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
    return next((name for name, key in KEYS.items() if hmac.compare_digest(given, key.encode())), None)


records, questions = demo_inbox()
store = ExemplarStore.from_records(
    records, local_embeddings(), input_key="text", output_key="label", owner_key="customer"
)
selector = PoissonExampleSelector(store, calls=20, threshold=0.5, eligible=0.2)
budget = PrivacyBudget(3, 1e-5, 100, "sqlite:///served.db", "served", scope="per_principal")
member = LabelScorer(local_llm(), DEMO_LABELS, instruction="", content_free=DEMO_CONTENT_FREE)
route = PrivateEnsemble(selector, member) | DPAggregate(NoisyVote(DEMO_LABELS), budget, return_receipt=True)

app = FastAPI()
add_dp_routes(app, route, "/route", principal_from=caller)
server = uvicorn.Server(uvicorn.Config(app, port=8765, log_level="warning"))
thread = threading.Thread(target=server.run)
thread.start()
while not server.started and thread.is_alive():
    time.sleep(0.1)
URL, headers = "http://127.0.0.1:8765/route/invoke", {"authorization": f"Bearer {KEYS['front-desk']}"}
asked = {"input": {"input": "Could you renew my metformin prescription before Friday? Vera Stern"}}
answered = httpx.post(URL, json=asked, headers=headers, timeout=300).json()["output"]
print(answered["answer"], "for", answered["receipt"]["principal"], "with", answered["receipt"]["remaining"], "left")
print("without a key:", httpx.post(URL, json=asked).json())
server.should_exit = True
thread.join()
