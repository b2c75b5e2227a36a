"""The ledger's tables. A ledger of another version is refused.

- plans: frozen content under a name, its scope, the fingerprint of the data, and the generation of data it counts on
- counters: how much is allowed and spent, one row per line, and per line and principal in a ``per_principal`` plan
  (where the row without a principal holds the allowance and is never spent). ``spent`` only grows and gives out the
  numbers; what counts is ``spent - returned``, where ``returned`` are tokens that were charged and never sampled.
  ``lost`` is how much of ``spent`` was counted for charges that the ledger may have lost (`witness`); where owners pay
  with tickets, each of them has so many fewer
- charges: one row per release, what it counts for (``units``: one, or its tokens), its receipt and its answer once they
  are recorded; ``number`` is the last of the numbers that it took
- queries: the latest charge for a query, which is what replay looks up
- filters: what a filtered budget has spent at each order, as hexadecimal floats
- acts: fresh starts, with their reasons
- owner_index, owner_marks: of a plan whose owners pay with tickets, how many entries its owner index has, and what they
  are. An owner has one entry: a position that is never given again, and a mark there (a keyed hash). Each row holds the
  marks from the position ``start`` on; ``changes`` counts the owners who were forgotten
- usage, usage_rows, usage_counts: of each counter of such a plan, the positions that used a ticket at each charge
  (``usage_rows``, numbered without a gap), the sums of the earlier rows by position (``usage_counts``), and one row
  that says what all of this must be (``usage``): how many rows and tickets, the chained hash of all rows (``chain``;
  ``base`` of the summed ones), the hashes of the sums (``sums``) and of the first ``owners`` marks (``marks``), and the
  counter's ``spent`` and ``lost``. ``digest`` is the hash of the row, which the witness knows too, and ``before`` the
  one before. Private: see `tickets`
"""

from __future__ import annotations

import hashlib
import secrets

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from langchain_dpicl.errors import LedgerError

VERSION = 5
SQLITE_APPLICATION_ID = 0x44504943  # "DPIC"
UNLIMITED = 2**62
IDENTITY = "identity"
ADVICE = (
    "stop every process that uses it, put a whole copy in place if it is damaged or gone (remove its -wal and -shm "
    "first), and run "
    "`dpicl budget recover`, which counts as spent whatever that copy may lack"
)
"""For a ledger that was lost, damaged or rolled back. A copy alone would start counting again from where it was."""
_LOCK = 0x6470696C  # a number for PostgreSQL's advisory lock; any would do, as long as all workers use the same

metadata = sa.MetaData()
meta = sa.Table(
    "dpicl_meta",
    metadata,
    sa.Column("key", sa.String(64), primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
)
plans = sa.Table(
    "dpicl_plans",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("name", sa.String(255), nullable=False, unique=True),
    sa.Column("content", sa.Text, nullable=False),
    sa.Column("digest", sa.String(64), nullable=False),
    sa.Column("created", sa.String(40), nullable=False),
    sa.Column("scope", sa.String(20), nullable=False, server_default="shared"),
    sa.Column("fingerprint", sa.Text),
    sa.Column("generation", sa.Integer, nullable=False, server_default="1"),
    sa.Column("tickets", sa.Integer, nullable=False, server_default="0"),
)
counters = sa.Table(
    "dpicl_counters",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("plan_id", sa.Integer, sa.ForeignKey("dpicl_plans.id"), nullable=False),
    sa.Column("line", sa.String(255), nullable=False),
    sa.Column("principal", sa.String(255), nullable=False, server_default=""),
    sa.Column("allowed", sa.BigInteger, nullable=False),
    sa.Column("spent", sa.BigInteger, nullable=False),
    sa.Column("returned", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("lost", sa.BigInteger, nullable=False, server_default="0"),
    sa.UniqueConstraint("plan_id", "line", "principal", name="dpicl_one_counter"),
    sa.CheckConstraint(
        "returned >= 0 AND returned <= spent AND spent - returned <= allowed", name="dpicl_never_over_spent"
    ),
)
charges = sa.Table(
    "dpicl_charges",
    metadata,
    sa.Column("counter_id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("charged", sa.String(40), nullable=False),
    sa.Column("units", sa.BigInteger, nullable=False, server_default="1"),
    sa.Column("outcome", sa.String(255)),
    sa.Column("receipt", sa.Text),
    sa.Column("answer", sa.Text),
    sqlite_with_rowid=False,  # rows are appended in key order: a charge touches few pages, whatever came before
)
queries = sa.Table(
    "dpicl_queries",
    metadata,
    sa.Column("counter_id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("query", sa.String(64), primary_key=True),
    sa.Column("number", sa.BigInteger, nullable=False),
    sqlite_with_rowid=False,
)
filters = sa.Table(
    "dpicl_filters",
    metadata,
    sa.Column("plan_id", sa.Integer, sa.ForeignKey("dpicl_plans.id"), primary_key=True, autoincrement=False),
    sa.Column("state", sa.Text, nullable=False),
)
acts = sa.Table(
    "dpicl_acts",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("name", sa.String(255), nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("announced", sa.String(40), nullable=False),
    sa.Column("generation", sa.Integer),
    sa.Column("carried_out", sa.String(40)),
    sa.Column("before", sa.Text),
    sa.Column("after", sa.Text),
)
owner_index = sa.Table(
    "dpicl_owner_index",
    metadata,
    sa.Column("plan_id", sa.Integer, sa.ForeignKey("dpicl_plans.id"), primary_key=True, autoincrement=False),
    sa.Column("size", sa.BigInteger, nullable=False),
    sa.Column("changes", sa.BigInteger, nullable=False, server_default="0"),
)
owner_marks = sa.Table(
    "dpicl_owner_marks",
    metadata,
    sa.Column("plan_id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("start", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("marks", sa.LargeBinary, nullable=False),
)
usage = sa.Table(
    "dpicl_usage",
    metadata,
    sa.Column("counter_id", sa.Integer, sa.ForeignKey("dpicl_counters.id"), primary_key=True, autoincrement=False),
    *(
        sa.Column(name, sa.BigInteger, nullable=False)
        for name in ("row_count", "summed", "tickets", "spent", "lost", "owners")
    ),
    *(
        sa.Column(name, sa.String(32), nullable=False)
        for name in ("chain", "base", "sums", "marks", "before", "digest")
    ),
)
usage_rows = sa.Table(
    "dpicl_usage_rows",
    metadata,
    sa.Column("counter_id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("units", sa.BigInteger, nullable=False),
    sa.Column("positions", sa.LargeBinary, nullable=False),
)
usage_counts = sa.Table(
    "dpicl_usage_counts",
    metadata,
    sa.Column("counter_id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("counts", sa.LargeBinary, nullable=False),
)

in_use: sa.ColumnElement[int] = counters.c.spent - counters.c.returned
"""What a counter counts against its allowance."""


def hashed(*pieces: bytes) -> str:
    """The hash of these bytes, and of how they are cut."""
    found = hashlib.blake2b(digest_size=16)
    for piece in pieces:
        found.update(len(piece).to_bytes(8, "big") + piece)
    return found.hexdigest()


def usage_digest(
    chain: str = "", row_count: int = 0, tickets: int = 0, spent: int = 0, lost: int = 0, owners: int = 0
) -> str:
    """The digest of a usage row. Summing rows does not change it, and forgetting does not."""
    return hashed(f"{chain}:{row_count}:{tickets}:{spent}:{lost}:{owners}".encode())


def has_ledger(connection: Connection) -> bool:
    """Whether any of a ledger's tables is there."""
    return bool(_tables(connection))


def check_version(connection: Connection) -> None:
    """`LedgerError` if the tables are of another version, or if some of them are lost."""
    present = _tables(connection)
    version: str | None = None
    if "dpicl_meta" in present:
        version = connection.scalar(sa.select(meta.c.value).where(meta.c.key == "schema_version"))
    if version is not None and version != str(VERSION):
        raise LedgerError(f"the ledger has schema version {version}; this release reads version {VERSION} alone")
    if version is None or present != set(metadata.tables):
        raise LedgerError(f"the ledger has lost tables; {ADVICE}")


def identity_of(connection: Connection) -> str | None:
    """The random name that was made with the ledger; None if it lost it."""
    return connection.scalar(sa.select(meta.c.value).where(meta.c.key == IDENTITY))


def key_of(connection: Connection, name: str) -> bytes:
    """A random key that was made with the ledger: "query_key" or "fingerprint_key"."""
    found = connection.scalar(sa.select(meta.c.value).where(meta.c.key == name))
    if found is None:
        raise LedgerError(f"the ledger has lost its keys; {ADVICE}")
    return bytes.fromhex(found)


def _tables(connection: Connection) -> set[str]:
    return set(sa.inspect(connection).get_table_names()) & set(metadata.tables)


def open_schema(connection: Connection, *, create: str | None) -> None:
    """Make the tables, or check them, within the caller's transaction.

    ``create`` is the identity of a ledger that may be made; None if none may. Raises `LedgerError` for a ledger that
    is not there, that another version wrote, or that has lost tables.
    """
    sqlite = connection.dialect.name == "sqlite"
    if not sqlite:  # workers that start together wait for the first
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
    if has_ledger(connection):
        check_version(connection)
        return
    if create is None:
        raise LedgerError("there is no ledger here")
    metadata.create_all(connection)
    # Random keys, made once: without them no hash in the ledger can be tried against a guess.
    rows = [{"key": key, "value": secrets.token_hex(32)} for key in ("query_key", "fingerprint_key")]
    rows += [{"key": "schema_version", "value": str(VERSION)}, {"key": IDENTITY, "value": create}]
    connection.execute(sa.insert(meta), rows)
    if sqlite:
        connection.exec_driver_sql(f"PRAGMA application_id={SQLITE_APPLICATION_ID}")
