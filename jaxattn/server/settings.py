"""Settings of a server: addresses, keys, limits and times."""

import dataclasses

LOOPBACK = ("127.0.0.1", "::1", "localhost")
MOST_CHOICES = 128
MOST_STOPS = 16
MOST_STOP_CHARACTERS = 256
MOST_STOP_TOKENS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How a server listens, and what it refuses.

    Attributes:
        names: of the model; the first is the one that answers carry.
        keys: that a client may use; none lets everyone in.
        origins: web sites whose pages may call this server.
        max_waiting: choices that may wait beside those that the batch has rows for.
        max_waiting_tokens: prompt tokens that may wait for their first token; None sets no limit.
        max_body_bytes: of a request.
        body_seconds: for a request's head to arrive, and then for its body.
        queue_seconds: for the first token to come; None waits for ever.
        request_seconds: for the whole answer; None sets no limit.
        write_seconds: for a client to take one piece of an answer.
        ping_seconds: between comments that keep an idle stream open.
        drain_seconds: for running requests to end after SIGTERM.
        stuck_seconds: that one step of the engine may take; after that the process ends.
        tool_parser: name of the format of tool calls; None recognises it from the chat template.
        access_log: one line for each request, without prompts and answers.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    names: tuple[str, ...] = ("model",)
    keys: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    max_waiting: int = 128
    max_waiting_tokens: int | None = None
    max_body_bytes: int = 4 * 2**20
    body_seconds: float = 30.0
    queue_seconds: float | None = None
    request_seconds: float | None = None
    write_seconds: float = 60.0
    ping_seconds: float = 15.0
    drain_seconds: float = 30.0
    stuck_seconds: float = 300.0
    tool_parser: str | None = None
    access_log: bool = True

    @property
    def local(self) -> bool:
        """Whether none but this machine can connect."""
        return self.host in LOOPBACK
