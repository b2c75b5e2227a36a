"""Few-shot templates: what an example says is no part of the template.

LangChain's `FewShotPromptTemplate` fills its examples into a text, and takes that whole text for a template once more.
A brace in a record would then be a placeholder: every member that sees it fails, or finds the request's values there.
"""

from __future__ import annotations

from typing import Any

from langchain_core.prompts import FewShotPromptTemplate, FewShotPromptWithTemplates, StringPromptTemplate

from langchain_dpicl.errors import UnsafeConfigurationError

_FEW_SHOT = (FewShotPromptTemplate, FewShotPromptWithTemplates)
_HOLDING_TEXT = (str, dict, list, tuple)


class LiteralExample(StringPromptTemplate):
    """An example's template, whose values stay as they are when its text is filled in again as an f-string."""

    example: StringPromptTemplate

    def format(self, **kwargs: Any) -> str:
        """The example with the braces of its values doubled."""
        return self.example.format(**_escaped(kwargs))

    async def aformat(self, **kwargs: Any) -> str:
        """`format`, asynchronously."""
        return await self.example.aformat(**_escaped(kwargs))


def _escaped(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: str(value).replace("{", "{{").replace("}", "}}") if isinstance(value, _HOLDING_TEXT) else value
        for name, value in values.items()
    }


def literal_examples(part: Any) -> dict[str, Any]:
    """Return the changes to a part of a chain so that examples are no templates: a few-shot template's new fields.

    Raises `UnsafeConfigurationError` for a few-shot template of a kind that has no such change.
    """
    if not isinstance(part, _FEW_SHOT) or part.example_selector is None:
        return {}
    if part.template_format != "f-string" or getattr(part.example_prompt, "template_format", "f-string") != "f-string":
        raise UnsafeConfigurationError(
            f"a {type(part).__name__} in {part.template_format} would take what records say for a part of its "
            'template: use template_format="f-string", or a FewShotChatMessagePromptTemplate'
        )
    if isinstance(part.example_prompt, LiteralExample):
        return {}
    inner = part.example_prompt
    return {"example_prompt": LiteralExample(example=inner, input_variables=inner.input_variables)}
