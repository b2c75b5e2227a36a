"""`serving.guards`: what a request may take, and whose it is."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable
from typing import Any

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from langchain_dpicl import InvalidParameter
from langchain_dpicl.serving import guards
from langchain_dpicl.serving.guards import (
    MAX_DEPTH,
    ApiKeys,
    Failure,
    Limits,
    Slots,
    hash_of,
    new_key,
    read_body,
    read_json,
)


def request_of(messages: Callable[[], Any], **headers: str) -> Request:
    sent = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": sent}, messages)


def piece(body: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


# -- bodies ------------------------------------------------------------------------------------------------------------


async def test_a_body_in_pieces_is_read_whole() -> None:
    pieces = iter([piece(b"ab"), piece(b""), piece(b"c", more=False)])

    async def receive() -> dict[str, Any]:
        return next(pieces)

    assert await read_body(request_of(receive), Limits(max_body_bytes=3)) == b"abc"


async def test_no_more_is_read_than_the_limit() -> None:
    read = 0

    async def endless() -> dict[str, Any]:
        nonlocal read
        read += 1
        return piece(b"x" * 10)

    with pytest.raises(Failure) as caught:
        await read_body(request_of(endless), Limits(max_body_bytes=25))
    assert caught.value.status == 413
    assert read == 3
    with pytest.raises(Failure) as caught:
        await read_body(request_of(endless, content_length="26"), Limits(max_body_bytes=25))
    assert caught.value.status == 413
    assert read == 3, "a length that is announced is believed before a byte is read"


async def test_a_body_that_comes_too_slowly_is_given_up() -> None:
    async def slow() -> dict[str, Any]:
        await asyncio.sleep(0.02)
        return piece(b"x")

    with pytest.raises(Failure) as caught:
        await read_body(request_of(slow), Limits(body_seconds=0.1))
    assert caught.value.status == 408
    assert caught.value.headers == {"Connection": "close"}


async def test_a_client_that_leaves_within_its_body_is_refused() -> None:
    pieces = iter([piece(b'{"inp'), {"type": "http.disconnect"}])

    async def receive() -> dict[str, Any]:
        return next(pieces)

    with pytest.raises(Failure):
        await read_body(request_of(receive), Limits())


def test_json_is_as_deep_as_allowed_and_no_deeper() -> None:
    assert read_json(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH) is not None
    for body in (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), b'{"a":' * 2000 + b"1" + b"}" * 2000):
        with pytest.raises(Failure):
            read_json(body)


# -- slots -------------------------------------------------------------------------------------------------------------


async def test_no_more_run_at_once_than_there_are_slots_and_none_is_lost() -> None:
    slots, running, most = Slots(4), 0, 0

    async def work(size: int) -> int:
        nonlocal running, most
        running += size
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= size
        return size

    async def ask(size: int) -> int:
        while True:
            try:
                return await slots.run(lambda: work(size), size)
            except Failure:
                await asyncio.sleep(0.001)

    sizes = [1, 3, 2, 4] * 25
    assert await asyncio.gather(*map(ask, sizes)) == sizes
    assert most == 4
    assert (await slots.run(lambda: work(4), 4)) == 4, "every slot came back"


async def test_a_flood_is_refused_at_once_and_waiting_ends() -> None:
    slots, go = Slots(2), asyncio.Event()
    under_way = [asyncio.create_task(slots.run(go.wait, 1)) for _ in range(2)]
    await asyncio.sleep(0)
    waiting = [asyncio.create_task(slots.run(go.wait, 1)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Failure):
        await asyncio.wait_for(slots.run(go.wait, 1), 0.2)
    for late in waiting:
        with pytest.raises(Failure):
            await asyncio.wait_for(late, 5)
    go.set()
    assert await asyncio.gather(*under_way) == [True, True]
    assert await slots.run(go.wait, 2)


async def test_who_gives_up_waiting_takes_no_slot_along() -> None:
    slots, go = Slots(1), asyncio.Event()
    first = asyncio.create_task(slots.run(go.wait, 1))
    await asyncio.sleep(0)
    second = asyncio.create_task(slots.run(go.wait, 1))
    await asyncio.sleep(0)
    go.set()
    await first
    second.cancel()  # its turn has come in this very moment
    with pytest.raises(asyncio.CancelledError):
        await second
    assert await asyncio.wait_for(slots.run(go.wait, 1), 0.5)


async def test_what_has_begun_ends_though_its_caller_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    slots, go, ended = Slots(1), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        await go.wait()
        ended.set()
        raise RuntimeError("CANARY")

    caller = asyncio.create_task(slots.run(work, 1))
    await asyncio.sleep(0.01)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError), caplog.at_level(logging.DEBUG):
        await caller
    go.set()
    await asyncio.wait_for(ended.wait(), 1)
    assert await slots.run(go.wait, 1), "and its slot comes back"
    assert "CANARY" not in caplog.text


# -- keys --------------------------------------------------------------------------------------------------------------


def test_a_key_is_known_by_its_hash_alone() -> None:
    key, other = new_key(), new_key()
    assert key != other
    assert len(key) >= 43, "256 bits"
    keys = ApiKeys({"alice": hash_of(key), "bob": hash_of(other)})
    assert keys.principal(request_of(lambda: None, authorization=f"Bearer {key}")) == "alice"
    assert keys.principal(request_of(lambda: None, authorization=f"Bearer {other}")) == "bob"
    for wrong in ("", key[:-1], key + "x", hash_of(key), "alice", key.upper()):
        with pytest.raises(HTTPException):
            keys.principal(request_of(lambda: None, authorization=f"Bearer {wrong}"))
    assert key not in repr(vars(keys))


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "Basic KEY", "KEY", "Bearer KEY KEY", "bearer\tKEY"])
def test_only_a_bearer_key_opens(header: str) -> None:
    key = new_key()
    keys = ApiKeys({"alice": hash_of(key)})
    with pytest.raises(HTTPException) as caught:
        keys.principal(request_of(lambda: None, authorization=header.replace("KEY", key)))
    assert caught.value.status_code == 401
    assert caught.value.headers == {"WWW-Authenticate": "Bearer"}
    assert keys.principal(request_of(lambda: None, authorization=f"Bearer {key}")) == "alice"


@pytest.mark.parametrize(
    "hashes",
    [
        {"alice": "dpicl_SECRET-key-itself"},
        {"alice": "SECRET"},
        {"al ice": "0" * 64},
        {"": "0" * 64},
        {"alice": "0" * 64, "bob": "0" * 64},
        {"alice": None},
    ],
)
def test_bad_keys_are_refused_without_being_shown(hashes: Any) -> None:
    with pytest.raises(InvalidParameter) as caught:
        ApiKeys(hashes)
    assert "SECRET" not in str(caught.value)


def check_whole_hashes(patch: pytest.MonkeyPatch) -> None:
    """A key whose hash differs from the right one in a single digit, wherever that is, is refused."""
    right = "a" * 64
    hashes = {str(i): right[:i] + "b" + right[i + 1 :] for i in range(64)} | {"right": right}
    patch.setattr(guards, "hash_of", hashes.__getitem__)
    keys = ApiKeys({"alice": right})
    assert keys.principal(request_of(lambda: None, authorization="Bearer right")) == "alice"
    for wrong in map(str, range(64)):
        with pytest.raises(HTTPException):
            keys.principal(request_of(lambda: None, authorization=f"Bearer {wrong}"))


def test_every_digit_of_a_hash_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    check_whole_hashes(monkeypatch)


@pytest.mark.parametrize("part", [slice(8), slice(32), slice(63), slice(1, 64)])
def test_comparing_a_part_of_a_hash_is_caught(part: slice, monkeypatch: pytest.MonkeyPatch) -> None:
    compare = hmac.compare_digest
    monkeypatch.setattr(guards.hmac, "compare_digest", lambda given, known: compare(given[part], known[part]))
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        check_whole_hashes(monkeypatch)


def test_a_name_may_have_an_old_key_and_a_new_one() -> None:
    old, new = new_key(), new_key()
    keys = ApiKeys({"alice": [hash_of(old), hash_of(new)]})
    assert keys.names == ["alice"]
    for key in (old, new):
        assert keys.principal(request_of(lambda: None, authorization=f"Bearer {key}")) == "alice"
    for wrong in ({"alice": []}, {"alice": [hash_of(old)] * 2}, {"alice": [hash_of(old)], "bob": hash_of(old)}, {}):
        with pytest.raises(InvalidParameter):
            ApiKeys(wrong)  # type: ignore[arg-type]
