"""Opening a ledger beside its witness: refuse one that was lost, and count as spent what it may lack."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import URL, Connection

from langchain_dpicl.budget import schema
from langchain_dpicl.budget.schema import ADVICE, Account, charges, counters, plans
from langchain_dpicl.budget.stored import StoredLedger
from langchain_dpicl.budget.witness import GIVEN_UP, CounterKey, Mark, Witness, rolled_back
from langchain_dpicl.errors import InvalidParameter, LedgerError, PrivacyWarning
from langchain_dpicl.sql import Database, insert, parse, shown, sqlite_path
from langchain_dpicl.sql.address import is_text

Where = str | os.PathLike[str] | None
"""The place of a ledger's witness: a path or a database URL; None: beside the ledger."""

USUAL = "dpicl-budget.db"
"""The file of a ledger that nobody named. Whoever made it without knowing is told once."""

LOST = "counted as spent: the charge of a process that was killed, or of a copy that was lost"


logger = logging.getLogger("langchain_dpicl.budget")


class CounterRow(NamedTuple):
    """A counter as the ledger has it. ``id`` is None if the ledger lacks it."""

    plan_id: int
    key: CounterKey
    allowed: int
    tickets: bool = False
    spent: int = 0
    in_use: int = 0
    id: int | None = None


def counts(connection: Connection, only: CounterKey | None = None) -> dict[CounterKey, CounterRow]:
    """Every counter of a ledger, or ``only`` this one.

    A principal's counter that the ledger lacks, if asked for, has spent nothing.
    """
    query = sa.select(counters, plans.c.name, plans.c.digest, plans.c.tickets).join(plans)
    if only is not None:
        query = query.where(
            plans.c.name == only.plan,
            plans.c.digest == only.digest,
            counters.c.line == only.line,
            counters.c.principal.in_(["", only.principal]),
        )
    found: dict[CounterKey, CounterRow] = {}
    for row in connection.execute(query):
        key = CounterKey(row.name, row.line, row.principal, row.digest)
        in_use = row.spent - row.returned
        found[key] = CounterRow(row.plan_id, key, row.allowed, bool(row.tickets), row.spent, in_use, row.id)
    return found if only is None else with_missing(found, [only])


def with_missing(found: Mapping[CounterKey, CounterRow], wanted: Iterable[CounterKey]) -> dict[CounterKey, CounterRow]:
    """These counters, and those that the ledger lacks: principals' counters, on which it has counted nothing."""
    complete = dict(found)
    for key in wanted:
        line = found.get(key._replace(principal=""))
        if line is not None:
            complete.setdefault(key, CounterRow(line.plan_id, key, line.allowed, line.tickets))
    return complete


def lose(connection: Connection, count: CounterRow, units: int) -> None:
    """Count units as spent without a charge, and make the counter if it is missing. None of them comes back."""
    account = Account(count.plan_id, count.key.line, count.key.principal)
    if count.id is None:
        values = {"id": schema.new_id(), "allowed": count.allowed, "spent": 0}
        insert(connection, counters, {**account._asdict(), **values})
    more = {"spent": counters.c.spent + units, "lost": counters.c.lost + units}
    changed = sa.update(counters).values(more).where(account.counter).returning(counters.c.id, counters.c.spent)
    row = connection.execute(changed).one()
    charge = {"counter_id": row.id, "number": row.spent, "charged": schema.utc_now(), "units": units, "outcome": LOST}
    connection.execute(sa.insert(charges).values(charge))


def address(ledger: Database, witness: str | os.PathLike[str] | None) -> URL:
    """The witness's URL: as it was given (a path or a URL), or beside the ledger."""
    if witness is None:
        if ledger.path is None:
            return ledger.url
        return URL.create("sqlite", database=f"{ledger.path}.witness")
    given = os.fspath(witness) if isinstance(witness, (str, os.PathLike)) else None
    if not isinstance(given, str) or not is_text(given):
        raise InvalidParameter("witness", type(witness).__name__, "a path, or a database URL")
    url = URL.create("sqlite", database=given)
    if "://" in given:
        url = parse(given, "witness", "sqlite:///budget.db.witness")
    if url.get_backend_name() == "sqlite" and sqlite_path(url) is None:
        raise InvalidParameter("witness", shown(url), "one that is kept: in memory it ends with this process")
    return url


def is_behind(ledger: StoredLedger, plan: str) -> bool:
    """True if the witness beside a ledger knows more of this plan than the ledger: an older copy is in its place."""
    with contextlib.closing(Witness(address(ledger, None))) as witness:
        about = witness.about()
        if not about or about.get("identity") != ledger.identity:  # it is elsewhere: nobody can tell
            return False
        found = ledger.run(counts, "read")
        of_plan = [mark for mark in witness.marks() if mark.key.plan == plan and mark.reserved]
    for mark in of_plan:
        count = found.get(mark.key)
        if count is None or count.spent < mark.reserved:
            return True
    return False


def _exists(ledger: Database) -> bool:
    """True if there is a ledger, or a file in its place."""
    if ledger.path is not None:
        return os.path.exists(ledger.path) and os.path.getsize(ledger.path) > 0
    return bool(ledger.run(schema.tables_of, "read"))


def open_beside(ledger: StoredLedger, given: str | os.PathLike[str] | None) -> Witness:
    """Open a ledger, or make a new one, beside its witness.

    `LedgerError` for a ledger without a witness, and for a witness whose ledger is gone.
    """
    url = address(ledger, given)
    if _exists(ledger):  # looked at first: whoever makes a ledger makes its witness before
        with contextlib.closing(Witness(url)) as reader:
            has_witness = bool(reader.about())
        if not has_witness:
            if not ledger.run(schema.tables_of, "read"):
                raise LedgerError(
                    f"the file {ledger.shown!r} holds no tables: it is not a ledger, or one that has lost its log (the "
                    f"file of its name with -wal); {ADVICE}"
                )
            ledger.run(lambda connection: schema.open_schema(connection, create=None), "read")
            raise LedgerError(
                f"the ledger {ledger.shown!r} has no witness at {shown(url)!r}, so it may be a copy that starts "
                f"counting again: nothing was charged; name its witness, or {ADVICE}"
            )
    witness = Witness(url)
    about = witness.begin()
    if about["made"] and not _exists(ledger):
        raise LedgerError(
            f"the ledger {ledger.shown!r} is gone, and its witness {witness.shown!r} knows that it was there: nothing "
            f"was charged; {ADVICE}. For another budget name another ledger: both then count. Deleting a ledger takes "
            "no answer back. Only if no earlier answer counts, because it was a trial on data of nobody, remove the "
            "witness as well: by that you vouch for it"
        )

    def make(connection: Connection) -> str | None:
        schema.open_schema(connection, create=None if about["made"] else about["identity"])
        return schema.read_meta(connection, "identity")

    if ledger.run(make) == about["identity"] and not about["made"]:
        ledger.write_through()
        witness.note(made="yes")
        if ledger.path is not None and os.path.basename(ledger.path) == USUAL:
            logger.warning(
                "a new ledger counts what is spent: %s, with its witness. Keep both; ledger= (on the command line "
                "--ledger) names another place",
                ledger.path,
            )
    return witness


def check(ledger: Database, witness: Witness) -> None:
    """Compare a ledger with its witness, and `settle`. `LedgerError` if it is another one, or was rolled back."""
    about = witness.about()
    # The marks before the counters, which are then as far or further.
    known = witness.marks()
    identity, found = ledger.run(
        lambda connection: (schema.read_meta(connection, "identity"), counts(connection)), "read"
    )
    if identity is None or about.get("identity") != identity:
        words = f"the ledger {ledger.shown!r} is not the one whose witness is {witness.shown!r}"
        raise LedgerError(f"{words}: nothing was charged; {ADVICE}")
    here = {(count.key.plan, count.key.digest) for count in found.values()}
    for mark in known:
        is_known = (mark.key.plan, mark.key.digest) in here
        if mark.reserved == 0 or not mark.key.line or (mark.low == GIVEN_UP and not is_known):
            continue  # nothing was charged, no version charges it, or the ledger need not have it
        count = found.get(mark.key)
        spent = count.spent if count else 0
        if not is_known or spent < mark.low:
            raise rolled_back(mark.key, spent, mark.low)
        if spent < mark.reserved:
            settle(ledger, mark)


def settle(ledger: Database, mark: Mark) -> None:
    """Count as spent what the witness has reserved on a counter and the ledger has not counted."""
    key = mark.key

    def work(connection: Connection) -> int:
        plan_id = sa.select(plans.c.id).where(plans.c.name == key.plan).scalar_subquery()
        account = {"plan_id": plan_id, "line": key.line, "principal": key.principal}
        connection.execute(sa.select(counters.c.id).filter_by(**account).with_for_update()).all()  # no charge now
        count = counts(connection, key).get(key)
        if count is None:
            raise rolled_back(key)
        if count.spent < mark.low:
            raise rolled_back(key, count.spent, mark.low)
        units = max(0, mark.reserved - count.spent)
        if units:
            lose(connection, count, units)
        return units

    if units := ledger.run(work):
        warnings.warn(
            f"a process was killed while it charged the ledger {ledger.shown!r}, or an older copy is in its place: "
            f"what may have been spent counts as spent ({key.plan!r} {key.line}: {units})",
            PrivacyWarning,
            stacklevel=2,
        )
