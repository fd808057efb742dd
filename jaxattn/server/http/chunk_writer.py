"""The writer of a streamed response's chunks, straight to the transport of its connection."""

from uvicorn.protocols.http.h11_impl import H11Protocol

CHUNKS = "jaxattn.chunks"  # key in the `extensions` of an ASGI scope


class ChunkWriter:
    """A direct writer of chunks for a response that has begun, which bypasses h11 and tasks.

    A decode step for 128 streams causes 128 small writes, and h11 and the wake-up of a task take
    longer than the write itself. h11 does not count the bytes of a chunked body, so this writer
    and h11 may both write to one response.

    Args:
        connection: The connection of a response with a chunked body.
    """

    def __init__(self, connection: H11Protocol):
        self._connection = connection

    @property
    def ready(self) -> bool:
        """Whether the transport is open and its write buffer is not full."""
        connection = self._connection
        return not (connection.flow.write_paused or connection.transport.is_closing())

    def write(self, data: bytes) -> None:
        """Writes a chunk. `data` must not be empty, as an empty chunk ends the body."""
        self._connection.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
