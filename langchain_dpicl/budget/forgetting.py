"""Forgetting an owner in ledgers whose budgets no chain of this process uses: for the command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from langchain_dpicl.budget.owner_index import OwnerIndex
from langchain_dpicl.budget.stored import StoredLedger
from langchain_dpicl.errors import LedgerError, UnknownOwner
from langchain_dpicl.store.base import PrivateStore
from langchain_dpicl.store.owners import owner_mark, sketch_hash


def open_ledgers(store: PrivateStore, urls: Sequence[str]) -> tuple[list[StoredLedger], list[str]]:
    """These ledgers, those that the store remembers, and the places of the remembered ones that cannot be opened.

    Raises `LedgerError` where one of ``urls`` cannot be opened.
    """
    ledgers = {(ledger := StoredLedger(url)).identity: ledger for url in urls}
    lost: list[str] = []
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
        lost.append(budget.url)
    return list(ledgers.values()), list(dict.fromkeys(lost))


def forget(store: PrivateStore, owner: str, ledgers: Sequence[StoredLedger]) -> int:
    """Forget an owner in a store and then in ledgers; how many exemplars went.

    Where the store has no such owner, its rows and hashes leave the ledgers all the same (a repeated call ends what an
    interrupted one began), and `UnknownOwner` is raised after that. An exemplar that was its own owner is known by its
    content, so its rows stay then.
    """
    for ledger in ledgers:
        key = ledger.key("fingerprint_key")
        store.on_owner_forgotten(key, _seats_of(ledger), ledger.forget_prints)
    missing = False
    try:
        return store.forget(owner)
    except UnknownOwner:
        missing = True
    name = owner.encode("utf-8", "surrogatepass")
    for ledger in ledgers if missing else []:
        key = ledger.key("fingerprint_key")
        _seats_of(ledger)(owner_mark(key, name, named=True))
        ledger.forget_prints([sketch_hash(key, name)], lambda key=key: store.fingerprint(key))  # type: ignore[misc]
    raise UnknownOwner("the store holds no such owner; the ledgers hold nothing under its name any more")


def _seats_of(ledger: StoredLedger) -> Callable[[bytes], None]:
    """What takes a mark out of every plan with tickets."""

    def forget_mark(mark: bytes) -> None:
        for plan in ledger.plans():
            if plan.tickets:
                OwnerIndex(ledger, plan.id).forget(mark)

    return forget_mark
