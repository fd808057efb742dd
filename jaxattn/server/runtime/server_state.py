"""The states of a server, and the response to a request that arrives in each of them."""

import enum

from jaxattn.server.http.errors import ApiError

START_RETRY_SECONDS = 5


class ServerState(enum.StrEnum):
    """The states of a server, in the order in which it passes through them."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


_SAID = {
    ServerState.STARTING: "the model is being loaded and compiled; try again later",
    ServerState.DRAINING: "the server is shutting down; send the request to another server",
    ServerState.FAILED: "the engine has failed, and the server is shutting down",
}


def unavailable(phase: ServerState) -> ApiError:
    """Returns the 503 error of a phase in which the server accepts no requests."""
    headers = {"Retry-After": str(START_RETRY_SECONDS)}
    if phase is not ServerState.STARTING:
        headers = {"Connection": "close", "Retry-After": "1"}
    return ApiError(503, _SAID[phase], code=str(phase), headers=headers)
