"""HTTP as it comes over a connection: uvicorn's faster parser, with the bound on a request's head that it lacks."""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_FRAMING = 64 * 1024  # bytes of a request that are not its body, beyond those of its first packet
CHUNK_FRAMING = 8  # bytes that a body's byte may come with: it may be a chunk of its own


class BoundedProtocol(HttpToolsProtocol):
    """Refuses a request whose head, chunk sizes or trailers do not end."""

    framing = 0

    def data_received(self, data: bytes) -> None:
        self.framing += len(data)
        super().data_received(data)
        if self.framing > MOST_FRAMING and not self.transport.is_closing():
            self.send_400_response("The head of the request is too large.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.framing = 0

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self.framing -= CHUNK_FRAMING * len(body)
