"""Settings of a server: addresses, keys, limits and times."""

import dataclasses

LOOPBACK = ("127.0.0.1", "::1", "localhost")
MOST_CHOICES = 128
MOST_STOPS = 16
MOST_STOP_CHARACTERS = 256
MOST_STOP_TOKENS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The address, access control, limits and timeouts of a server.

    Attributes:
        host, port: The address to listen on. Port 0 picks a free port.
        names: The names of the served model. Responses carry the first one.
        keys: The API keys that the server accepts. Without keys, it accepts every client.
        origins: The web origins whose pages may call this server.
        max_waiting: The number of choices that may wait in addition to those with a row.
        max_waiting_tokens: The limit on the prompt tokens of requests that wait for their first
            token; None for no limit.
        max_body_bytes: The maximum size of a request's body.
        body_seconds: The time limit for a request's headers, and again for its body.
        queue_seconds: The time limit for the first token; None for no limit.
        request_seconds: The time limit for the whole answer; None for no limit.
        write_seconds: The time in which a client must accept one write.
        ping_seconds: The interval of the comments that keep an idle stream open.
        drain_seconds: The time that running requests get to finish after SIGTERM.
        stuck_seconds: The maximum time of one engine step. After it, the process exits.
        tool_parser: The name of the tool-call format; None derives it from the chat template.
        access_log: Whether to log one line per request, without prompts and answers.
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
        """Whether only clients on this machine can connect."""
        return self.host in LOOPBACK
