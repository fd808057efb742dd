"""States of a server: starting, ready, draining or failed, and their responses."""

import enum

from jaxattn.server.http.errors import ApiError

START_RETRY_SECONDS = 5


class ServerState(enum.StrEnum):
    """Of a server's life, in this order."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


_SAID = {
    ServerState.STARTING: "the model is being loaded and compiled; try again later",
    ServerState.DRAINING: "the server is shutting down; another one may take the request",
    ServerState.FAILED: "the engine has failed; the server ends",
}


def unavailable(phase: ServerState) -> ApiError:
    """Status 503 for a phase in which nothing is taken in."""
    headers = {"Retry-After": str(START_RETRY_SECONDS)}
    if phase is not ServerState.STARTING:
        headers = {"Connection": "close", "Retry-After": "1"}
    return ApiError(503, _SAID[phase], code=str(phase), headers=headers)
