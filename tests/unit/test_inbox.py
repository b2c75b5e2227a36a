"""The demonstration's inbox: the same everywhere, whole, and split by customer."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from typing import Any

import pytest

from langchain_dpicl.demo.inbox import (
    DEMO_CALLS,
    DEMO_ELIGIBLE,
    DEMO_LABELS,
    INPUT_KEY,
    OUTPUT_KEY,
    OWNER_KEY,
    demo_inbox,
    generate_inbox,
)
from langchain_dpicl.errors import InvalidParameter


def test_the_same_seed_gives_the_same_inbox_and_another_seed_another() -> None:
    first = generate_inbox(50)
    assert first == generate_inbox(50)
    assert first != generate_inbox(50, seed=1)
    assert generate_inbox(80)[: len(first)] == first


def test_the_inbox_has_the_size_it_promises_and_every_desk_its_share() -> None:
    records = generate_inbox()
    assert len({record[OWNER_KEY] for record in records}) == 800
    assert 1_900 <= len(records) <= 2_100
    per_customer = Counter(record[OWNER_KEY] for record in records)
    assert min(per_customer.values()) == 1
    assert max(per_customer.values()) == 6
    desks = Counter(record[OUTPUT_KEY] for record in records)
    assert set(desks) == set(DEMO_LABELS)
    assert min(desks.values()) > 0.3 * len(records)


def test_messages_are_varied_whole_and_sensitive() -> None:
    records = generate_inbox()
    texts = [record[INPUT_KEY] for record in records]
    assert len(set(texts)) > 0.98 * len(texts)
    assert not any("{" in text or "  " in text or text != text.strip() for text in texts)
    # Names, dates, drugs and amounts aside, there are still hundreds of different sentences.
    plain = {re.sub(r"[A-Z]\w+|\d+|\W", " ", text).strip() for text in texts}
    assert len(plain) > 500
    assert all(set(record) == {OWNER_KEY, INPUT_KEY, OUTPUT_KEY} for record in records)
    assert all(re.search(r"\w+ \w+", text) for text in texts)


def test_no_message_names_its_desk() -> None:
    names = [name.lower() for name in DEMO_LABELS]
    assert not any(name in record[INPUT_KEY].lower() for record in generate_inbox() for name in names)


def test_questions_come_from_customers_that_the_store_does_not_hold() -> None:
    store, questions = demo_inbox(customers=100, questions=20)
    owners = {record[OWNER_KEY] for record in store}
    assert len(owners) == 100
    assert len(questions) == 20
    assert owners.isdisjoint(record[OWNER_KEY] for record in questions)


def test_a_quick_trial_asks_for_fewer_customers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPICL_DEMO_CUSTOMERS", "70")
    assert len({record[OWNER_KEY] for record in demo_inbox(questions=5)[0]}) == 70
    for wrong in ("0", "some", "-3"):
        monkeypatch.setenv("DPICL_DEMO_CUSTOMERS", wrong)
        with pytest.raises(InvalidParameter, match="DPICL_DEMO_CUSTOMERS"):
            demo_inbox()


def test_the_demonstration_samples_a_small_share_of_the_customers() -> None:
    assert 0 < DEMO_CALLS / (DEMO_ELIGIBLE * 800) <= 0.15


@pytest.mark.parametrize("customers", [0, -1, 2.5, "many", True])
def test_a_customer_count_is_checked(customers: Any) -> None:
    with pytest.raises(InvalidParameter, match="customers"):
        generate_inbox(customers)


@pytest.mark.parametrize("questions", [0, -1, None])
def test_a_number_of_questions_is_checked(questions: Any) -> None:
    with pytest.raises(InvalidParameter, match="questions"):
        demo_inbox(10, questions)


def test_the_inbox_is_byte_for_byte_the_one_that_was_measured() -> None:
    digest = hashlib.sha256(json.dumps(generate_inbox()).encode()).hexdigest()
    assert digest == "46ff887404931e7b92a51d585f100cbb8bd1fc6d6204b2705cd7b14b57705856"
