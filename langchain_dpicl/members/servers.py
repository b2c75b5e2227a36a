"""One model on several OpenAI-compatible servers: `ModelServers`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from langchain_dpicl.calls.servers import Servers, SlotGate
from langchain_dpicl.calls.transport import clients
from langchain_dpicl.errors import InvalidParameter, ModelUnavailable
from langchain_dpicl.extras import require
from langchain_dpicl.privacy import checks
from langchain_dpicl.private import Closed

if TYPE_CHECKING:
    from langchain_openai import ChatOpenAI, OpenAI

CONCURRENCY = 4
"""How many calls one server has at once, unless told."""

_LONGEST, _CONNECT, _LOOK = 600.0, 3.0, 5.0
"""Seconds that a request, a connection and a look at a server's list of models may take."""

T = TypeVar("T")

_log = logging.getLogger("langchain_dpicl")


class ModelServers(Closed):
    """The same model on several servers: a LangChain model whose calls each go to one of them.

    ``servers.chat_model()`` is a ``ChatOpenAI`` for any chain. Within a release each member's call draws its server by
    itself. If that server is gone, the call asks another; if it dies over the call, the call is repeated on another,
    alone and once, and abstains if that one dies, too. No other member's output changes by this:
    `langchain_dpicl.calls.servers` says why, and when. Outside of releases a request goes to the first server that
    answers, in an order drawn for it.

    Parameters
    ----------
    addresses
        What OpenAI's clients take as ``base_url``, such as ``http://10.0.0.1:8000/v1``.
    model
        The model's name, on each server. They should answer alike: the same weights, version, precision and settings,
        on the same kind of hardware.
    concurrency
        How many calls one server answers at once: a number for all, or one for each address. Further calls wait here,
        off their clocks, in the order in which they come. All models of this object share these slots; other processes
        have theirs.
    api_key
        Sent to each server as a bearer token.

    An answer is read whole before the chain sees it, also if it is streamed.

    Raises
    ------
    InvalidParameter
        No address, one that is no http or https address, two that are equal, a concurrency below 1, or a server that
        has another model. Names the server, by host and port.
    ModelUnavailable
        No server answers when this object is made. A server that does not answer beside others is logged.
    MissingExtra
        ``langchain-openai`` is not installed.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        model: str,
        *,
        concurrency: int | Sequence[int] = CONCURRENCY,
        api_key: str = "none",
    ) -> None:
        slots = checked(addresses, model, concurrency)
        require("langchain_openai", "openai")
        self.model = model
        self.addresses = tuple(slots)
        self._key = api_key
        self._servers = Servers({address: SlotGate(slots=count) for address, count in slots.items()})
        looked = self._of_all(self._models)
        for address, found in looked.items():
            if isinstance(found, list) and model not in found:
                raise InvalidParameter("addresses", place_of(address), f"servers of {model!r}: {_other(found)}")
        gone = [f"{place_of(address)} ({found})" for address, found in looked.items() if isinstance(found, str)]
        if len(gone) == len(slots):
            raise ModelUnavailable(f"no server of {model!r} answers: {', '.join(gone)}")
        for each in gone:
            _log.warning("a server of %r does not answer: %s", model, each)

    def chat_model(self, **settings: Any) -> ChatOpenAI:
        """A chat model on these servers. ``settings`` are those of ``ChatOpenAI``, such as ``temperature``."""
        made: ChatOpenAI = require("langchain_openai", "openai").ChatOpenAI(
            **self._about(), openai_proxy="", http_socket_options=(), **settings
        )
        return made

    def llm(self, **settings: Any) -> OpenAI:
        """A completion model on these servers. ``settings`` are those of ``langchain_openai.OpenAI``."""
        made: OpenAI = require("langchain_openai", "openai").OpenAI(**self._about(), **settings)
        return made

    def health(self) -> dict[str, str]:
        """Ask every server for its list of models: by its address "", or what is wrong.

        A public question, for an operator or a monitor. No call asks it, and none follows its answer.
        """
        return self._of_all(self.trouble)

    def trouble(self, address: str) -> str:
        """What is wrong with one server; "" if nothing is."""
        found = self._models(address)
        return found if isinstance(found, str) else "" if self.model in found else _other(found)

    def _about(self) -> dict[str, Any]:
        about = {"model": self.model, "base_url": self.addresses[0], "api_key": self._key}
        return about | clients(self._servers, _LONGEST, _CONNECT)

    def _of_all(self, ask: Callable[[str], T]) -> dict[str, T]:
        """Ask all servers at once."""
        with ThreadPoolExecutor(len(self.addresses)) as pool:
            return dict(zip(self.addresses, pool.map(ask, self.addresses), strict=True))

    def _models(self, address: str) -> list[str] | str:
        """A server's models, or why it shows none."""
        import httpx

        try:
            with httpx.Client(trust_env=False, timeout=_LOOK) as client:
                answer = client.get(f"{address}/models", headers={"Authorization": f"Bearer {self._key}"})
            if not answer.is_success:
                return f"status {answer.status_code}"
            return [str(each["id"]) for each in answer.json()["data"]]
        except httpx.HTTPError as error:
            return f"no answer: {type(error).__name__}"
        except (ValueError, LookupError, TypeError):
            return "no list of models"

    def __repr__(self) -> str:
        return f"ModelServers({[*map(place_of, self.addresses)]}, {self.model!r})"


def place_of(address: str) -> str:
    """The host and the port of an address. Its path may hold a key."""
    import httpx

    return httpx.URL(address).netloc.decode("ascii")


def checked(addresses: Sequence[str], model: object, concurrency: int | Sequence[int]) -> dict[str, int]:
    """By each address, as clients write it, how many calls its server has at once. Raises `InvalidParameter`."""
    import httpx

    if not isinstance(model, str) or not model:
        raise InvalidParameter("model", model, "the model's name on its servers")
    if isinstance(addresses, str) or not isinstance(addresses, Sequence) or not addresses:
        raise InvalidParameter("addresses", addresses, "a list of at least one address")
    counts = concurrency if isinstance(concurrency, Sequence) else [concurrency] * len(addresses)
    if len(counts) != len(addresses):
        raise InvalidParameter("concurrency", concurrency, f"a number, or {len(addresses)}, one for each address")
    slots: dict[str, int] = {}
    for number, (given, count) in enumerate(zip(addresses, counts, strict=True), 1):
        url = None
        with contextlib.suppress(httpx.InvalidURL, TypeError):
            url = httpx.URL(given)
            url = httpx.URL(str(url).rstrip("/"))
        if url is not None and (url.userinfo or url.query):
            raise InvalidParameter("addresses", url.host, "addresses without a password or a query: use api_key")
        if url is None or url.scheme not in ("http", "https") or not url.host:
            raise InvalidParameter("addresses", given, "http or https addresses, such as http://10.0.0.1:8000/v1")
        if str(url) in slots:
            raise InvalidParameter("addresses", given, f"addresses that differ: number {number} is there before")
        slots[str(url)] = checks.whole("concurrency", count)
    return slots


def _other(models: list[str]) -> str:
    return f"this one serves {', '.join(map(repr, models[:5])) or 'none'}"
