"""A quota on a real database: processes at once, and a server's workers, give a caller exactly its part."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest
from by_hand import charge
from http_server import CHAIN, dpicl_serve

from langchain_dpicl import PrivacyBudget, QuotaExceeded


def takes(url: str, principal: str, times: int) -> int:
    budget = PrivacyBudget(1000, 1e-5, 200, url, "shared", replay=False, quota=15)
    line = budget.line("vote", 0.1)
    taken = 0
    for _ in range(times):
        try:
            charge(line, principal=principal)
        except QuotaExceeded:
            continue
        taken += 1
    budget.close()
    return taken


def test_processes_at_once_give_exactly_a_part(any_url: str) -> None:
    takes(any_url, "carol", 1)
    with ProcessPoolExecutor(3, multiprocessing.get_context("spawn")) as pool:
        found = [pool.submit(takes, any_url, name, 10) for name in ("alice", "alice", "alice", "bob")]
        assert [sum(each.result() for each in found[:3]), found[3].result()] == [15, 10]
    budget = PrivacyBudget.open("shared", any_url)
    assert budget.principals() == {"alice": {"vote": 15}, "bob": {"vote": 10}, "carol": {"vote": 1}}
    assert budget.spent() == 26
    budget.close()


@pytest.mark.slow
def test_workers_at_once_give_exactly_a_part(tmp_path: Path) -> None:
    chain = CHAIN.format(releases=40, scope="shared").replace('scope="shared"', "replay=False, quota=7")
    with dpicl_serve(tmp_path, names=("alice", "bob"), chain=chain, workers=2) as served:

        def ask(client: httpx.Client, name: str, number: int) -> tuple[int, str]:
            body = {"input": {"input": f"{number}"}}
            response = client.post(f"{served.url}/invoke", json=body, headers=served.headers(name))
            return response.status_code, response.json().get("error", "")

        with httpx.Client(timeout=60) as client, ThreadPoolExecutor(8) as pool:
            found = [*pool.map(partial(ask, client, "alice"), range(20))]
            assert sorted(found) == [(200, "")] * 7 + [(429, "QuotaExceeded")] * 13
            assert ask(client, "bob", 0) == (200, "")
            state = client.get(f"{served.url}/budget", headers=served.headers("alice")).json()
    (line,) = state["lines"].values()
    assert (line["spent"], line["quota"], line["quota_left"]) == (8, 7, 0)
