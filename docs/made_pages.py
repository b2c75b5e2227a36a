"""The pages of the site that are made of other files: README, results, tests, examples, notebooks, the command line.

A hook of mkdocs. Pages link to files of the repository as they lie there (``../results/README.md``), so that links
work in the repository and on the site.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic.fields import FieldInfo

import langchain_dpicl
from langchain_dpicl.cli import COMMANDS, parser_of
from langchain_dpicl.spec import SECTIONS
from langchain_dpicl.spec.description import BudgetSection, SelectorSection
from langchain_dpicl.spec.signatures import Section

ROOT = Path(__file__).parents[1]
AS_THEY_ARE = (
    "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "tests/README.md", "results/README.md",
    "results/*/README.md", "results/*/table.md", "results/*/*.json", "results/*/*.png",
)  # fmt: skip


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is not in ``docs/``."""
    for path in sorted(path for pattern in AS_THEY_ARE for path in ROOT.glob(pattern)):
        name = path.relative_to(ROOT).as_posix()
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    made = {"reference/cli.md": command_line(), "reference/kinds.md": kinds(), "examples/README.md": examples()}
    made |= {f"notebooks/{path.stem}.md": notebook(path) for path in sorted(ROOT.glob("docs/notebooks/*.ipynb"))}
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages."""
    name = page.file.src_uri
    if (ROOT / name).exists():  # a file of the repository outside of docs/
        markdown = re.sub(r"\]\(((?:\.\./)*)docs/", r"](\1", markdown)
    else:
        up = "../" * (name.count("/") + 1)
        markdown = re.sub(rf"\]\({re.escape(up)}(?=\w)", f"]({up[3:]}", markdown)
    markdown = re.sub(r"(\]\((?:\.\./)*examples/)(\w+)\.py\)", r"\1README.md#\2py)", markdown)
    return re.sub(r"(\]\((?:\.\./)*notebooks/\w+)\.ipynb\)", r"\1.md)", markdown)


def examples() -> str:
    """Return the page of the example scripts."""
    parts = ["# Examples", "Each script runs as it stands, with the embedded models (`langchain-dpicl[local]`)."]
    for path in sorted(ROOT.glob("examples/*.py")):
        parts += [f"## {path.name}", f"```python\n{path.read_text(encoding='utf-8').strip()}\n```"]
    return "\n\n".join(parts)


def notebook(path: Path) -> str:
    """Return a notebook as a page: its texts, its code, and what the code printed when it was last run."""
    parts = [f"[This notebook as a file]({path.name})"]
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"]).strip()
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", []):
            shown = output.get("text") or output.get("data", {}).get("text/plain", [])
            parts.append("```text\n" + "".join(shown).rstrip() + "\n```")
    return "\n\n".join([parts[1], parts[0], *parts[2:]])


def command_line() -> str:
    """Return the page of the commands, made of their parsers."""
    parts = ["# Command line", "Every command prints one JSON object with `--json`, and exits with 1 if it fails."]
    parts += ["| command | what it does |\n|---|---|\n" + "\n".join(
        f"| [`dpicl {name}`](#dpicl-{name}) | {summary} |" for name, (_, summary) in COMMANDS.items()
    )]  # fmt: skip
    for name in COMMANDS:
        [commands] = subparsers(parser_of([name]))
        parts += command(commands.choices[name], 2)
    return "\n\n".join(parts)


def kinds() -> str:
    """Return the page of the kinds of release, made of the registry."""
    parts = [
        "# Kinds of release",
        "A server's file takes these under `release:`, and `dpicl answer` as `--mode`. A kind has one name everywhere; "
        "in Python it is the class attribute `kind`. `selector:` and `budget:` are the same for all kinds.",
        "| kind | what it is |\n|---|---|\n"
        + "\n".join(f"| [`{kind}`](#{kind}) | {first_line(section)} |" for kind, section in SECTIONS.items()),
    ]
    sections: dict[str, type[Section]] = {**SECTIONS, "selector": SelectorSection, "budget": BudgetSection}
    for name, section in sections.items():
        rows = [setting(field, about) for field, about in section.model_fields.items() if field != "kind"]
        parts += [f"## {name}", first_line(section), "| setting | meaning |\n|---|---|\n" + "\n".join(rows)]
    return linked("\n\n".join(parts))


def first_line(section: type[Section]) -> str:
    return inspect.cleandoc(section.__doc__ or "").partition("\n\n")[0].replace("\n", " ")


def setting(name: str, field: FieldInfo) -> str:
    """Return a setting's row of the table."""
    words = (field.description or "").replace("``", "`").replace("|", "\\|")
    if field.is_required():
        return f"| `{name}` | {words} (required) |"
    usual = field.get_default(call_default_factory=True)
    return f"| `{name}` | {words}{'' if usual in (None, '', {}) else f' (default `{usual!r}`)'} |"


def subparsers(parser: argparse.ArgumentParser) -> list[Any]:
    return [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]


def command(parser: argparse.ArgumentParser, level: int) -> Iterator[str]:
    """Yield the parts of one command's description."""
    yield f"{'#' * level} {parser.prog}"
    if parser.description:
        yield described(parser.description)
    actions = [action for action in parser._actions if not isinstance(action, argparse._SubParsersAction)]
    usage = re.sub(r"\s+", " ", parser.format_usage().removeprefix("usage: ")).strip()
    yield f"```text\n{folded(usage)}\n```"
    rows = [row(parser, action) for action in actions if action.help != argparse.SUPPRESS and action.dest != "help"]
    if rows:
        yield "| option | meaning |\n|---|---|\n" + "\n".join(rows)
    for group in subparsers(parser):
        for each in group.choices.values():
            yield from command(each, level + 1)


def described(text: str) -> str:
    """Return a docstring as Markdown: its indented lines are commands."""
    text = inspect.cleandoc(text).replace("``", "`").replace("::\n", ":\n")
    return re.sub(
        r"((?:^ {2,}\S.*(?:\n|\Z))+)", lambda found: f"```sh\n{inspect.cleandoc(found[0])}\n```\n", text, flags=re.M
    )


def folded(usage: str, width: int = 100) -> str:
    """Break a command's usage between its options."""
    lines = [""]
    for part in re.findall(r"\[[^\]]*\](?:\S*)|\S+", usage):
        if lines[-1] and len(lines[-1]) + len(part) >= width:
            lines.append("   ")
        lines[-1] += f" {part}" if lines[-1] else part
    return "\n".join(lines)


def row(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Return an option's row of the table."""
    value = ""
    if action.nargs != 0:
        value = parser._get_formatter()._format_args(action, action.dest.upper())
    names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.metavar or action.dest}`"
    names += f" `{value}`" if value and action.option_strings else ""
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    shown = "required" if action.required and action.option_strings else ""
    default = action.default
    if default not in (None, False, argparse.SUPPRESS, []) and "default" not in text and action.nargs != 0:
        shown = f"default `{default}`"
    text = "; ".join(part for part in (text, shown) if part)
    names, text = (cell.replace("|", "\\|") for cell in (names, text))
    return f"| {names} | {text} |"


class Docstrings(griffe.Extension):
    """Let Markdown read the package's docstrings: prose stands before the sections, and names are links."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = linked(prose_first(obj.docstring.value))


def prose_first(text: str) -> str:
    """Move a paragraph that follows a section's items before the sections: the parser takes it for items."""
    prose: list[str] = []
    sections: list[str] = []
    into = prose
    lines = [*text.splitlines(), ""]
    for line, after in pairwise(lines):
        if set(after) == {"-"}:
            into = sections
        elif into is sections and line[:1].strip("- ") and not after.startswith(" "):
            into = prose
        if into is prose and prose and not prose[-1] and sections and not line:
            continue
        into.append(line)
    return "\n".join([*prose, "", *sections])


def linked(text: str) -> str:
    """Link each public name in single backticks to its place in the reference, or among the errors."""
    names = "|".join(langchain_dpicl.__all__)
    return re.sub(rf"(?<![`\[])`({names})`(?!`)", lambda found: f"[`{found[1]}`][{found[1].lower()}]", text)
