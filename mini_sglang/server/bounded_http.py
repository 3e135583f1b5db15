"""uvicorn's HTTP/1.1 protocol with a limit on the size of request line and headers.

The parser has no limit and would collect headers without end. Knows nothing of the app.
"""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 1 << 16


class BoundedHttp(HttpToolsProtocol):
    """Answers 400 and closes the connection when request line and headers exceed MAX_HEAD_BYTES."""

    _head_bytes = 0  # received since the last part of a body, or since the last request ended

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"Request line and headers may take at most {MAX_HEAD_BYTES} bytes.")

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        super().on_message_complete()
