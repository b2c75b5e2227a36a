"""A small OpenAI-compatible server that a test writes the answers of: a real one, on a free port of 127.0.0.1."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, dict[str, str], str]
"""Status, further headers, and the text of the answer."""


class ChatServer:
    """Counts what it is asked, by the last message's text, and whose connection was closed before the answer."""

    models = ("m",)
    """What it lists."""
    more: Callable[[str], dict[str, Any]] = staticmethod(lambda text: {})
    """What an answer holds beside its text."""

    def __init__(self, reply: Callable[[str], Reply]) -> None:
        self.asked: list[str] = []
        self.hung_up: list[str] = []
        self._connections: list[socket.socket] = []
        self._reply = reply
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def kill(self) -> None:
        """As a process that ends: nothing listens any more, and every connection breaks."""
        self.close()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def setup(self) -> None:
                super().setup()
                outer._connections.append(self.connection)

            def do_GET(self) -> None:
                whole = json.dumps({"data": [{"id": name} for name in outer.models]}).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(whole)))
                self.end_headers()
                self.wfile.write(whole)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                prompt = body["messages"][-1]["content"]
                outer.asked.append(prompt)
                status, headers, text = outer._reply(prompt)
                message = {"role": "assistant", "content": text}
                choice = {"index": 0, "message": message, "finish_reason": "stop", **outer.more(text)}
                answer: dict[str, Any] = {"id": "1", "object": "chat.completion", "created": 1, "model": "m"}
                whole = json.dumps({**answer, "choices": [choice]} if status == 200 else {"error": text}).encode()
                try:
                    for line in headers.pop("before", "").splitlines(keepends=True):  # before the head of the answer
                        self.wfile.write(line.encode().replace(b"\n", b"\r\n"))
                        time.sleep(0.05)
                    self.send_response(status)
                    for name, value in headers.items():
                        if name != "drip":
                            self.send_header(name, value)
                    self.send_header("content-type", "application/json")
                    self.send_header("content-length", str(len(whole) + len(headers.get("drip", ""))))
                    self.end_headers()
                    for space in headers.get("drip", ""):  # white space before the answer, which keeps a reader waiting
                        self.wfile.write(space.encode())
                        time.sleep(0.05)
                    self.wfile.write(whole)
                except OSError:
                    outer.hung_up.append(prompt)

            def log_message(self, *arguments: Any) -> None:
                pass

        return Handler


@contextlib.contextmanager
def chat_server(reply: Callable[[str], Reply]) -> Iterator[ChatServer]:
    """A running `ChatServer`."""
    server = ChatServer(reply)
    try:
        yield server
    finally:
        server.close()
