"""Several servers of one model behind one address, as the operations page writes the proxy: no request is repeated."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from chat_server import ChatServer, Reply, chat_server
from http_server import free_port, until
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from pages import NGINX, blocks

from langchain_dpicl.private import boundary
from langchain_dpicl.private.boundary import ABSTAIN
from langchain_dpicl.private.copy import Pristine
from langchain_dpicl.private.models import limit

openai = pytest.importorskip("langchain_openai")
TEXTS = "abcXdefgh"
KILLS = "X"

Proxied = Callable[..., str]


@pytest.fixture
def proxied(tmp_path: Path) -> Iterator[Proxied]:
    """An address behind which two servers stand, by the page's own block, or by one that was changed."""
    if shutil.which("nginx") is None:
        pytest.skip("no nginx")

    def start(first: ChatServer, second: ChatServer, change: Callable[[str], str] = str) -> str:
        (block,) = blocks("operations.md", "nginx", "Members over several servers")
        port = free_port()
        places = [server.url.removeprefix("http://").removesuffix("/v1") for server in (first, second)]
        for written, place in zip(("7200", "7201", "7202"), (f"{port}", *places), strict=True):
            block = block.replace(f"127.0.0.1:{written}", place if ":" in place else f"127.0.0.1:{place}")
        (tmp_path / "proxy.conf").write_text(change(block))
        (tmp_path / "nginx.conf").write_text(NGINX.replace("include models.conf;", ""))
        subprocess.run(["nginx", "-p", str(tmp_path), "-c", "nginx.conf"], check=True, capture_output=True)
        until(lambda: httpx.get(f"http://127.0.0.1:{port}/v1/models").status_code == 200, 30)
        return f"http://127.0.0.1:{port}/v1"

    yield start
    if (tmp_path / "nginx.pid").exists():
        os.kill(int((tmp_path / "nginx.pid").read_text()), signal.SIGTERM)


def outputs(way: str, url: str, at_once: int) -> list[Any]:
    model = openai.ChatOpenAI(model="m", base_url=url, api_key="k", max_retries=0, http_socket_options=())
    copies = Pristine(boundary.seal(ChatPromptTemplate.from_template("{input}") | model | StrOutputParser()))
    how = {"max_concurrency": at_once, "timeout": limit(copies, 20, at_once)}
    requests: list[boundary.MemberRequest] = [({"input": text}, []) for text in TEXTS]
    if way == "sync":
        return boundary.run_private(copies, requests, **how)
    return asyncio.run(boundary.arun_private(copies, requests, **how))


def killed_by(servers: list[ChatServer]) -> Callable[[int], Callable[[str], Reply]]:
    """Replies of a server that a prompt kills."""

    def of(number: int) -> Callable[[str], Reply]:
        def reply(prompt: str) -> Reply:
            if prompt == KILLS:
                servers[number].kill()
            time.sleep(0.1)
            return 200, {}, prompt.upper()

        return reply

    return of


@pytest.mark.parametrize("way", ["sync", "async"])
def test_a_prompt_that_kills_its_server_reaches_no_other_and_changes_no_other_output(
    way: str, proxied: Proxied
) -> None:
    """As many calls at once as there are servers."""
    servers: list[ChatServer] = []
    reply = killed_by(servers)
    with chat_server(reply(0)) as first, chat_server(reply(1)) as second:
        servers += [first, second]
        found = outputs(way, proxied(first, second), 2)
        assert found == [ABSTAIN if text == KILLS else text.upper() for text in TEXTS]
        assert sorted(first.asked + second.asked) == sorted(TEXTS), "no request is made twice"
        assert min(len(first.asked), len(second.asked)) > 0, "both were asked"


def test_a_proxy_that_repeats_would_lose_both_servers(proxied: Proxied) -> None:
    """The test above can fail: this is what the page warns of."""
    servers: list[ChatServer] = []
    reply = killed_by(servers)
    with chat_server(reply(0)) as first, chat_server(reply(1)) as second:
        servers += [first, second]

        def repeats(block: str) -> str:
            return re.sub(r"proxy_next_upstream [^;]*;", "proxy_next_upstream error non_idempotent;", block)

        found = outputs("sync", proxied(first, second, repeats), 2)
        assert (first.asked + second.asked).count(KILLS) == 2
        assert found.count(ABSTAIN) > 1
