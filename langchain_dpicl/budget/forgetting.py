"""Forgetting an owner in ledgers whose budgets no chain of this process uses: for the command line."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from langchain_dpicl.budget.owner_index import OwnerIndex
from langchain_dpicl.budget.stored import StoredLedger
from langchain_dpicl.errors import LedgerError, UnknownOwner
from langchain_dpicl.store.base import PrivateStore
from langchain_dpicl.store.owners import owner_mark, sketch_hash


def open_ledgers(store: PrivateStore, urls: Sequence[str]) -> tuple[list[StoredLedger], list[str]]:
    """These ledgers, those that the store remembers, and the places of the remembered ones that cannot be opened.

    Raises `LedgerError` if one of ``urls`` cannot be opened.
    """
    ledgers = {(ledger := StoredLedger(url)).identity: ledger for url in urls}
    lost: dict[str, None] = {}
    for budget in store.budgets:
        if budget.ledger in ledgers:
            continue
        try:
            found = StoredLedger(budget.url)
            if found.identity == budget.ledger:
                ledgers[budget.ledger] = found
                continue
            found.close()
        except LedgerError:
            pass
        lost[budget.url] = None
    return list(ledgers.values()), list(lost)


def forget(store: PrivateStore, owner: str, ledgers: Sequence[StoredLedger]) -> int:
    """Forget an owner in a store and then in ledgers; returns how many exemplars went.

    If the store has no such owner, its rows and hashes leave the ledgers all the same (a repeated call ends what an
    interrupted one began), and then `UnknownOwner` is raised. An exemplar that was its own owner is known by its
    content, so its rows stay then.
    """
    keys = [ledger.key("fingerprint_key") for ledger in ledgers]
    for ledger, key in zip(ledgers, keys, strict=True):
        store.on_owner_forgotten(key, partial(_forget_mark, ledger), ledger.forget_prints)
    try:
        return store.forget(owner)
    except UnknownOwner:
        name = owner.encode("utf-8", "surrogatepass")
    for ledger, key in zip(ledgers, keys, strict=True):
        _forget_mark(ledger, owner_mark(key, name, named=True))
        ledger.forget_prints([sketch_hash(key, name)], partial(store.fingerprint, key))
    raise UnknownOwner("the store holds no such owner; the ledgers hold nothing under its name any more")


def _forget_mark(ledger: StoredLedger, mark: bytes) -> None:
    for plan in ledger.plans():
        if plan.tickets:
            OwnerIndex(ledger, plan.id).forget(mark)
