"""A stand-in for a model's OpenAI-compatible API: a real HTTP server whose answers are written by a function."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[list[dict[str, Any]]], str | int]
"""Takes a request's messages; returns the reply's text, or an HTTP status to fail with."""


class ModelApi:
    """Serves `/v1/chat/completions` on loopback.

    Attributes:
        requests: the bodies received.
        answer: decides each reply; tests may replace it.
    """

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.requests: list[dict[str, Any]] = []
        self.authorizations: list[str | None] = []
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                api.requests.append(body)
                api.authorizations.append(self.headers.get("Authorization"))
                reply = api.answer(body["messages"])
                if isinstance(reply, int):
                    self._send(reply, {"error": {"message": f"failed with {reply}", "type": "server_error"}})
                    return
                choice = {"index": 0, "message": {"role": "assistant", "content": reply}, "finish_reason": "stop"}
                usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
                self._send(
                    200,
                    {"id": "x", "object": "chat.completion", "model": "my-model", "choices": [choice], "usage": usage},
                )

            def do_GET(self) -> None:
                self._send(200, {"object": "list", "data": [{"id": "my-model", "object": "model"}]})

            def _send(self, status: int, value: dict[str, Any]) -> None:
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.base_url = f"http://127.0.0.1:{self._server.server_port}/v1"

    @contextmanager
    def serving(self) -> Iterator[ModelApi]:
        """Serve until the block ends."""
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join(5)


def solve_hello(messages: list[dict[str, Any]]) -> str:
    """Solve the task that `orchard init` writes, one action at a time."""
    if len([message for message in messages if message["role"] == "assistant"]) == 0:
        return "I write the file.\n<shell>printf 'hello, orchard\\n' > hello.txt</shell>"
    return "Done. <submit/>"
