"""A release as a tool: for agents, and for the tool nodes of graphs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from langchain_core.runnables import Runnable
from pydantic import Field, create_model

from langchain_dpicl.aggregators import ReleasedKeywords
from langchain_dpicl.errors import InvalidParameter, MembersAbstained, ModelUnavailable, PrivacyBudgetExceeded
from langchain_dpicl.release.flow import AnyRelease, releases_in

if TYPE_CHECKING:
    from langchain_core.tools import BaseTool

_ARGUMENT = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_TAKEN = {"self", "config", "run_manager", "callbacks", "args", "kwargs", "model_config"}

SPENT = (
    "The privacy budget of this tool is spent. It will not answer again, however it is asked: "
    "go on without it, and say so."
)
"""What an agent reads when nothing is left."""

ABSTAINED = "This tool found no answer to this; the attempt counts. Trying again later, or asking otherwise, may help."
"""What an agent reads when the release is that the members abstain."""

UNAVAILABLE = "The model behind this tool does not answer now. Trying again later may help."


def as_tool(
    release: Runnable[Any, Any], name: str, description: str, *, inputs: Mapping[str, str] | None = None
) -> BaseTool:
    """A LangChain tool that makes one release a call: for `create_agent`, or for a ``ToolNode``.

    Parameters
    ----------
    release
        A sealed release, a `DPSampler`, or a chain with one in it. It must answer a mapping.
    name, description
        What the agent reads.
    inputs
        The tool's arguments, strings, with what each means: the keys of the release's input. Default: what the
        release's selector is ``nearest_to``, else "input"; of a sampler its store's ``input_key``.

    The tool's message is the answer as text; of a release by itself its artifact is the receipt. A spent budget
    (`PrivacyBudgetExceeded`) or a model that is down reaches the agent as a tool message with the status "error" and a
    text that it can act on, at no cost; so do members that abstain, which is a release and charged like one. What else
    goes wrong is raised.
    """
    from langchain_core.tools import StructuredTool, ToolException

    found = releases_in(release)
    if not found:
        raise InvalidParameter("release", type(release).__name__, "a release, or a chain with one in it")
    if not isinstance(name, str) or not name:
        raise InvalidParameter("name", name, "a non-empty string")
    if not isinstance(description, str) or not description:
        raise InvalidParameter("description", description, "a non-empty string, for the agent")
    arguments = {found[0].query_key: "the question"} if inputs is None else dict(inputs)
    _check_arguments(arguments)
    fields: dict[str, Any] = {argument: (str, Field(description=meaning)) for argument, meaning in arguments.items()}
    runnable = release.with_receipt() if isinstance(release, AnyRelease) else release

    def call(*alone: str, **values: str) -> tuple[str, Any]:
        said = None
        try:
            answer = runnable.invoke(_asked(arguments, alone, values))
        except (PrivacyBudgetExceeded, ModelUnavailable) as error:
            said = _message(error)
        if said is not None:
            raise ToolException(said)
        return _told(answer)

    async def acall(*alone: str, **values: str) -> tuple[str, Any]:
        said = None
        try:
            answer = await runnable.ainvoke(_asked(arguments, alone, values))
        except (PrivacyBudgetExceeded, ModelUnavailable) as error:
            said = _message(error)
        if said is not None:
            raise ToolException(said)
        return _told(answer)

    return StructuredTool.from_function(
        call,
        acall,
        name=name,
        description=description,
        args_schema=create_model(f"{name}_arguments", **fields),
        response_format="content_and_artifact",
        handle_tool_error=True,
    )


def _check_arguments(arguments: Mapping[str, str]) -> None:
    for name, meaning in arguments.items():
        if not isinstance(name, str) or not _ARGUMENT.fullmatch(name) or name in _TAKEN or not isinstance(meaning, str):
            raise InvalidParameter(
                "inputs", name, "names of letters, digits and _ that LangChain leaves free, in words"
            )
    if not arguments:
        raise InvalidParameter("inputs", arguments, "at least one argument")


def _asked(arguments: Mapping[str, str], alone: tuple[str, ...], values: Mapping[str, str]) -> dict[str, str]:
    """The release's input. LangChain gives the only argument of a tool without its name where it was asked so."""
    return {**dict(zip(arguments, alone, strict=False)), **values}


def _message(error: Exception) -> str:
    if isinstance(error, PrivacyBudgetExceeded):
        return SPENT
    return ABSTAINED if isinstance(error, MembersAbstained) else UNAVAILABLE


def _told(answer: Any) -> tuple[str, Any]:
    """The answer as text for the agent, and the receipt where there is one."""
    receipt = None
    if isinstance(answer, Mapping) and set(answer) == {"answer", "receipt"}:
        answer, receipt = answer["answer"], answer["receipt"]
    if isinstance(answer, ReleasedKeywords):
        answer = ", ".join(answer)
    return str(answer), receipt
