"""Status endpoints: health, version, models, metrics, and the numbers of the server's page."""

import dataclasses
import datetime
import time
from typing import Any

from jaxattn import __version__
from jaxattn.server.decoding.sampling_params import read_sampling
from jaxattn.server.http.json_fields import JsonFields
from jaxattn.server.http.request import HttpRequest
from jaxattn.server.runtime.metrics import CONTENT_TYPE
from jaxattn.server.runtime.server_state import ServerState, unavailable
from jaxattn.server.runtime.service import Service


async def health(service: Service, exchange: HttpRequest) -> None:
    """Answers 200 if the server accepts requests, otherwise 503 with the reason."""
    if service.phase is not ServerState.READY:
        raise unavailable(service.phase)
    await exchange.json({"status": str(service.phase)})


async def ping(service: Service, exchange: HttpRequest) -> None:
    """Answers 200 in every phase of the server."""
    await exchange.json({"status": str(service.phase)})


async def version(service: Service, exchange: HttpRequest) -> None:
    await exchange.json({"version": __version__})


async def load(service: Service, exchange: HttpRequest) -> None:
    """Answers with the number of open requests."""
    await exchange.json({"server_load": service.admission.open})


async def models(service: Service, exchange: HttpRequest) -> None:
    """Answers with the model names that a request may use."""
    names = service.settings.names
    data = [_model(service, name) for name in names]
    ends = {"has_more": False, "first_id": names[0], "last_id": names[-1]}  # Anthropic's
    await exchange.json({"object": "list", "data": data, **ends})


async def model(service: Service, exchange: HttpRequest) -> None:
    """Answers with the entry of one model name.

    Raises:
        ApiError: 404 if the model does not have this name.
    """
    name = exchange.path("model_id")
    service.check_model(JsonFields({"model": name}))
    await exchange.json(_model(service, name))


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "type": "model",
        "display_name": name,
        "created_at": datetime.datetime.fromtimestamp(service.started, datetime.UTC).isoformat(),
        "object": "model",
        "created": service.started,
        "owned_by": "jaxattn",
        "root": service.settings.names[0],
        "parent": None,
        "max_model_len": service.limits.max_model_len,
    }


async def metrics(service: Service, exchange: HttpRequest) -> None:
    """Answers with all metrics in Prometheus' text format."""
    await exchange.whole(service.metrics.text(), 200, {"content-type": CONTENT_TYPE})


async def stats(service: Service, exchange: HttpRequest) -> None:
    """Answers with the numbers that the chat page shows. The totals count from the start."""
    held, plan = service.metrics.snapshot, service.metrics.plan
    await exchange.json(
        {
            "now": time.perf_counter(),
            "phase": str(service.phase),
            "model": service.settings.names[0],
            "startup": {
                "seconds": round(time.time() - service.started, 1),
                "tasks": list(service.served.progress())
                if service.phase is ServerState.STARTING
                else [],
            },
            "defaults": _sampling_defaults(service),
            "chat": service.tokenizer.has_chat_template,
            "max_model_len": service.limits.max_model_len,
            "rows": {"used": held.rows, "of": service.limits.batch},
            "waiting": service.metrics.waiting,
            "pages": {"used": held.pages, "of": service.limits.pages * service.limits.groups},
            "slots": {"used": held.slots, "of": service.limits.batch},
            "totals": dataclasses.asdict(service.metrics.totals),
            "plan": [
                {"name": item.name, "bytes": item.nbytes, "why": item.why}
                for item in (plan.items if plan else ())
            ],
        }
    )


def _sampling_defaults(service: Service) -> dict[str, float]:
    """Returns the sampling parameters of a request that sets none."""
    served = service.served
    plain = read_sampling(JsonFields({}), served.defaults, None, vocab_size=served.vocab_size)
    return {
        "temperature": plain.temperature,
        "top_p": plain.top_p,
        "top_k": plain.top_k,
        "min_p": plain.min_p,
        "repetition_penalty": plain.request_fields.get("repetition_penalty", 1.0),
    }
