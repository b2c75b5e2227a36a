"""What pages of the documentation show, for tests that run it."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
NGINX = """
pid nginx.pid;
error_log nginx.log;
events {}
http {
    access_log off;
    client_body_temp_path body; proxy_temp_path proxied; fastcgi_temp_path fast; uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;
    include models.conf;
    include proxy.conf;
}
"""
"""Around the blocks of the operations page."""


def blocks(page: str, language: str, title: str) -> list[str]:
    """The fenced blocks of a language in a section."""
    text = (DOCS / page).read_text(encoding="utf-8")
    section = text.partition(f"## {title}\n")[2].partition("\n## ")[0] if title else text
    return re.findall(rf"^```{language}\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
