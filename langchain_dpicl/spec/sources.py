"""The sources of a description: the sections ``store``, ``head`` and ``model``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from langchain_core.language_models import BaseLanguageModel
from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from sqlalchemy.engine import URL

from langchain_dpicl import sql
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.members.chains import ModelChoice
from langchain_dpicl.once.head import PrivateHead
from langchain_dpicl.private import notes
from langchain_dpicl.spec.signatures import Count, FilePath, Section, Text
from langchain_dpicl.store.records import RecordKeys
from langchain_dpicl.store.tables import check_name

if TYPE_CHECKING:
    from langchain_dpicl.store import ExemplarStore


_ADDRESS = "postgresql://user@host/database"
_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_HOST = rf"(?:{_BYTE}(?:\.{_BYTE}){{3}}|\[[\da-fA-F.]*:[\da-fA-F:.]*\]|[\w.-]*[A-Za-z][\w.-]*)"
# Of a model's server: for another, no client can be made.
_WEB_ADDRESS = re.compile(rf"https?://(?:[!-~]+@)?{_HOST}(?::\d{{1,5}})?(?:[/?][!-~]*)?", re.ASCII)


def _postgresql(url: str | None) -> str | None:
    if url is not None and sql.parse(url, "url", _ADDRESS).drivername != "postgresql+psycopg":
        raise InvalidParameter("url", "(not shown)", f'an address of PostgreSQL such as "{_ADDRESS}"')
    return url


def _one_address(value: Any) -> Any:
    if isinstance(value, list):
        raise ValueError("one address: several servers of a model stand behind one proxy (see the operations page)")
    return value


def _collection(name: str) -> str:
    check_name(name)
    return name


class StoreSection(Section):
    """The private examples: a store in a file of SQLite's (``file``), a collection on PostgreSQL (``url``), or a data
    file (``data``), alone or beside one of the others. The store then keeps the embeddings, and is made equal to the
    data file at every start, by one worker. For ``data`` alone it is the file ``DATA.store`` beside it."""

    file: FilePath | None = None
    url: Annotated[str | None, AfterValidator(_postgresql)] = Field(None, repr=False)
    name: Annotated[str, AfterValidator(_collection)] = "exemplars"
    """The collection's, at the ``url``. With ``data``, it is made if there is none."""
    vectors_in_memory: bool = True
    """Whether each worker keeps the collection's vectors, for a threshold: 1.5 GB for a million of 384 numbers."""
    data: FilePath | None = None
    delimiter: str | None = None
    encoding: str = "utf-8"
    skip_bad: bool = False
    """Whether to leave out records that cannot be used. Only the private notes say how many."""
    input_key: Text = "text"
    output_key: Text | None = "label"
    """None for texts without outputs."""
    owner_key: Text | None = None

    def check(self) -> None:
        if self.file is None and self.url is None and self.data is None:
            raise ValueError("give file (a store's), url (PostgreSQL), or data (JSON lines, CSV or Parquet)")
        if self.file is not None and self.url is not None:
            raise ValueError("give file or url: a store is in a file or on PostgreSQL")
        for is_unused, names, reason in (
            (self.url is None, ("name", "vectors_in_memory"), "a collection's, for url alone"),
            (self.data is None, ("delimiter", "encoding", "skip_bad"), "there is no data to be read"),
            (self.data is None and self.url is None, RecordKeys._fields, "the store has it"),
        ):
            if is_unused and (unused := sorted(self.model_fields_set.intersection(names))):
                raise InvalidParameter(unused[0], "(not shown)", f"left out: {reason}")

    def records(self, folder: Path, outputs: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Read and check the data file, if there is one. ``outputs``: what the examples' are, for `check_file`."""
        from langchain_dpicl.local import local_embeddings
        from langchain_dpicl.store.datacheck import check_file
        from langchain_dpicl.store.datafile import Reading
        from langchain_dpicl.store.records import too_long

        if self.data is None:
            return []
        reading = Reading(self.delimiter, self.encoding, self.skip_bad)
        keys = RecordKeys(self.input_key, self.output_key, self.owner_key)
        checks: dict[str, Any] = {**outputs, "too_long": partial(too_long, local_embeddings())}
        return check_file(folder / self.data, keys, reading, **checks).usable(self.skip_bad, notes.log.warning)

    def open(self, folder: Path, records: Sequence[Mapping[str, Any]]) -> ExemplarStore:
        """Open it. ``records``: the data file's.

        Raises `InvalidParameter` for ``data`` alone in a folder that cannot be written.
        """
        from langchain_dpicl.local import local_embeddings
        from langchain_dpicl.store.kept import store_of
        from langchain_dpicl.store.store import ExemplarStore, address

        model = local_embeddings()
        keys = RecordKeys(self.input_key, self.output_key, self.owner_key)
        about: dict[str, Any] = {"name": self.name, "vectors_in_memory": self.vectors_in_memory}
        place: str | URL | None = self.url
        if self.file is not None:
            place = address(folder / self.file)
        if self.data is None:
            assert place is not None
            asked = {key: value for key, value in keys._asdict().items() if key in self.model_fields_set}
            return ExemplarStore.open(place, model, **about, **asked)
        data = folder / self.data
        return store_of(data, records, model, keys, place, notes.log.warning, parameter="store.file", **about)


class HeadSection(Section):
    """A head that was released once, as `dpicl fit` writes it. The file's name alone may stand for the section.

    A server reads it when it starts, and needs no budget and no ledger for it.
    """

    file: FilePath
    embeddings: FilePath | None = None
    """The folder of the sentence-transformers model that embedded the head's records. Default: the embedded model."""

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, given: Any) -> Any:
        return {"file": given} if isinstance(given, str) else given

    def load(self, folder: Path, llm: BaseLanguageModel[Any] | None) -> PrivateHead:
        """Read it. ``llm``: the model of its label scores. Raises `InvalidParameter` for another file or model."""
        from langchain_dpicl.local import local_embeddings

        try:
            model = local_embeddings() if self.embeddings is None else local_embeddings(folder / self.embeddings)
            return PrivateHead.load(folder / self.file, model, llm=llm)
        except InvalidParameter as error:
            names = {"path": "head.file", "embeddings": "head.embeddings", "llm": "model", "views": "head.file"}
            wrong = InvalidParameter(names.get(error.parameter, error.parameter), error.value, error.bound)
        raise wrong


class ModelSection(Section):
    """An embedded model (by name), or one on an OpenAI-compatible server. Its key is read from the environment.

    Beside a head: the model of its label scores, if it looks at any. For ``documents``: an embedded model, a GGUF file,
    a folder of `save_pretrained`, or a server that shows every token's log-probability.
    """

    name: Text | None = None
    url: Annotated[str | None, BeforeValidator(_one_address)] = Field(default=None, repr=False)
    api_key_env: str = "OPENAI_API_KEY"
    max_concurrency: Count | None = None
    """How many calls of one answer run at once: not more than the server answers at once."""
    timeout: Annotated[float, Field(gt=0)] | Literal["auto"] | None = "auto"
    """Seconds that one call may take before its member abstains. None: no limit."""

    def check(self) -> None:
        if self.url is not None and not _WEB_ADDRESS.fullmatch(self.url):
            raise InvalidParameter("url", "(not shown)", 'an address such as "http://127.0.0.1:8000/v1"')
        if "api_key_env" in self.model_fields_set and self.choice.is_embedded:
            raise InvalidParameter("api_key_env", "(not shown)", "left out without url: an embedded model has no key")

    @cached_property
    def choice(self) -> ModelChoice:
        """The model. Raises `InvalidParameter`, under the file's names."""
        return ModelChoice(self.name, self.url, self.api_key_env)
