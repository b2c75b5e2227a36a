"""The code and the commands of the pages, as a newcomer finds them: by page and heading, each with its line."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

FOLLOW = """
import ast, json, linecache, runpy, sys
names = {"__name__": "__main__"}
own = sys.argv[1] and runpy.run_path(sys.argv[1])["Chatbot"](names)
for page, line, text in json.load(sys.stdin):
    source = "\\n" * (line - 1) + text
    linecache.cache[page] = len(source), None, source.splitlines(keepends=True), page
    tree = ast.parse(source, page)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id not in names and hasattr(type(own), node.id):
            names[node.id] = getattr(own, node.id)
    exec(compile(tree, page, "exec"), names)
"""
"""A program that runs blocks one after the other. Its tracebacks name pages and lines. What a page takes for its
reader's own is in the file that is the program's argument."""


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, the line where its text begins, its language and its text."""

    page: str
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A shell command of a page, and where it stands."""

    place: str
    words: tuple[str, ...]

    def option(self, name: str) -> str:
        """Return the option's value. It ends the trial if the command has none."""
        if name not in self.words:
            raise SystemExit(f"{self.place}: {shlex.join(self.words)}\nhas no {name}, which the trial looks for")
        return self.words[self.words.index(name) + 1]


def blocks(page: str, title: str, *languages: str) -> list[Block]:
    """Return a section's blocks in these languages, in order. The section's heading holds the title."""
    found: list[Block] = []
    headings: list[str] = []
    level = 0
    fence: tuple[int, str] | None = None
    lines = (ROOT / page).read_text("utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        opening = re.match(r"```(\w*)", line)
        if fence is not None:
            begin, name = fence
            if opening:
                fence = None
                if level and name in languages:
                    found.append(Block(page, begin + 1, name, "".join(lines[begin : number - 1])))
        elif opening:
            fence = number, opening[1]
        elif heading := re.match(r"(#+) (.*)", line):
            headings.append(heading[2])
            if level and len(heading[1]) <= level:
                level = 0
            if title.casefold() in heading[2].casefold():
                level = len(heading[1])
    if not found:
        raise SystemExit(f"{page} has no block of {languages} below {title!r}. Its headings: {headings}")
    return found


def commands(page: str, title: str) -> list[Command]:
    """Return the shell commands of a section, in order."""
    found: list[Command] = []
    for block in blocks(page, title, "sh", "bash"):
        number = block.line
        for text in re.split(r"(?<!\\)\n", block.text):
            words = shlex.split(text.replace("\\\n", " "), comments=True)
            if words:
                found.append(Command(f"{page}:{number}", tuple(words)))
            number += text.count("\n") + 1
    return found
