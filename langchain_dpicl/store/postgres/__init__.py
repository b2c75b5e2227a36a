"""The private exemplars on PostgreSQL with pgvector: for stores that many workers share, or that no memory holds."""

from langchain_dpicl.store.postgres.store import PostgresExemplarStore

__all__ = ["PostgresExemplarStore"]
