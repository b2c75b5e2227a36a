"""A release as a tool: for agents, and for the tool nodes of graphs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from langchain_core.runnables import Runnable
from pydantic import Field, create_model

from langchain_dpicl.aggregate import SealedRelease
from langchain_dpicl.aggregators import ReleasedKeywords
from langchain_dpicl.errors import InvalidParameter, ModelUnavailable, PrivacyBudgetExceeded
from langchain_dpicl.release import releases_in

if TYPE_CHECKING:
    from langchain_core.tools import BaseTool

SPENT = (
    "The privacy budget of this tool is spent. It will not answer again, however it is asked: "
    "go on without it, and say so."
)
"""What an agent reads when nothing is left."""

UNAVAILABLE = "The model behind this tool does not answer now. Trying again later may help."


def as_tool(
    release: Runnable[Any, Any], name: str, description: str, *, inputs: Mapping[str, str] | None = None
) -> BaseTool:
    """A LangChain tool that makes one release a call: for `create_agent`, or for a ``ToolNode``.

    Parameters
    ----------
    release
        A sealed release, or a chain with one in it. It must answer a mapping.
    name, description
        What the agent reads.
    inputs
        The tool's arguments, strings, with what each means: the keys of the release's input. Default: what the
        release's selector is ``nearest_to``, else "input".

    The tool's message is the answer as text; of a sealed release its artifact is the receipt. A spent budget
    (`PrivacyBudgetExceeded`) or a model that is down reaches the agent as a tool message with the status "error" and a
    text that it can act on; such a call costs nothing. What else goes wrong is raised.
    """
    from langchain_core.tools import StructuredTool, ToolException

    found = releases_in(release)
    if not found:
        raise InvalidParameter("release", type(release).__name__, "a sealed release, or a chain with one in it")
    if not isinstance(name, str) or not name:
        raise InvalidParameter("name", name, "a non-empty string")
    if not isinstance(description, str) or not description:
        raise InvalidParameter("description", description, "a non-empty string, for the agent")
    arguments = {found[0].query_key: "the question"} if inputs is None else dict(inputs)
    fields: dict[str, Any] = {argument: (str, Field(description=meaning)) for argument, meaning in arguments.items()}
    runnable = release.with_receipt() if isinstance(release, SealedRelease) else release

    def call(**values: str) -> tuple[str, Any]:
        said = None
        try:
            answer = runnable.invoke(values)
        except (PrivacyBudgetExceeded, ModelUnavailable) as error:
            said = _message(error)
        if said is not None:
            raise ToolException(said)
        return _told(answer)

    async def acall(**values: str) -> tuple[str, Any]:
        said = None
        try:
            answer = await runnable.ainvoke(values)
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


def _message(error: Exception) -> str:
    return SPENT if isinstance(error, PrivacyBudgetExceeded) else UNAVAILABLE


def _told(answer: Any) -> tuple[str, Any]:
    """The answer as text for the agent, and the receipt where there is one."""
    receipt = None
    if isinstance(answer, Mapping) and set(answer) == {"answer", "receipt"}:
        answer, receipt = answer["answer"], answer["receipt"]
    if isinstance(answer, ReleasedKeywords):
        answer = ", ".join(answer)
    return str(answer), receipt
