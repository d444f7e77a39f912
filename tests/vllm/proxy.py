"""A real HTTP proxy on loopback that damages what passes through it, as a test says."""

from __future__ import annotations

import dataclasses
import http.client
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

Answer = tuple[int, bytes]
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "host", "content-length"}


@dataclasses.dataclass
class Asked:
    """A request on its way: a damage may change path and content, or send it elsewhere."""

    method: str
    path: str
    content: bytes
    target: str

    @property
    def scores(self) -> bool:
        return self.path in ("/v1/completions", "/inference/v1/generate")


class Proxy:
    """`before(asked)` may change a request; `after(asked, status, content)` returns the answer that goes back, or None to
    break the connection."""

    def __init__(self, target: str):
        self.target, self.served = target, 0
        self.reset()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one(self) -> None:
                content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                asked = Asked(self.command, self.path, content, proxy.target)
                proxy.before(asked)
                proxy.served += 1
                status, answer = self.forward(asked)
                damaged = proxy.after(asked, status, answer)
                if damaged is None:
                    self.close_connection = True
                    return
                status, answer = damaged
                try:
                    self.send_response(status)
                    self.send_header("Content-Type", "application/json")
                    self.send_header("Content-Length", str(len(answer)))
                    self.end_headers()
                    self.wfile.write(answer)
                except (BrokenPipeError, ConnectionResetError):
                    self.close_connection = True  # the client has given up

            def forward(self, asked: Asked) -> Answer:
                place = urlsplit(asked.target)
                connection = http.client.HTTPConnection(place.hostname, place.port, timeout=60)
                try:
                    headers = {k: v for k, v in self.headers.items() if k.lower() not in HOP_BY_HOP}
                    connection.request(asked.method, asked.path, asked.content or None, headers)
                    response = connection.getresponse()
                    return response.status, response.read()
                except OSError:
                    return 502, b"{}"  # nothing listens behind the proxy
                finally:
                    connection.close()

            do_GET = do_POST = handle_one

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def reset(self) -> None:
        """Everything passes as it is."""
        self.before: Callable[[Asked], None] = lambda asked: None
        self.after: Callable[[Asked, int, bytes], Answer | None] = lambda asked, status, content: (status, content)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
