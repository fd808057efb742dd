"""The endpoint POST /v1/embeddings, which pools the model's hidden states of texts or tokens."""

import base64
import time
from typing import Any

import numpy as np
import orjson
from jaxtyping import Float

from jaxattn.engine.requests.request import POOLINGS
from jaxattn.server.decoding.output_collector import OutputChunk, OutputCollector
from jaxattn.server.decoding.sampling_params import MOST_ID, MOST_SALT
from jaxattn.server.http.errors import ApiError, bad
from jaxattn.server.http.request import HttpRequest
from jaxattn.server.openai.completions import encoded_prompts, read_prompts
from jaxattn.server.openai.response_interface import WholeForm
from jaxattn.server.openai.response_writer import ResponseWriter
from jaxattn.server.runtime.service import Service

MOST_INPUTS = 2048  # per request, as in OpenAI's API


async def embeddings(service: Service, exchange: HttpRequest) -> None:
    """Handles POST /v1/embeddings."""
    arrived = time.perf_counter()
    with service.entered() as ticket:
        fields = await exchange.fields()
        service.check_model(fields)
        if (size := service.served.hidden_size) is None:
            raise ApiError(400, "this model has no embeddings", code="no_embeddings")
        model_pooling, pooling = service.served.embedding, fields.chosen("pooling", POOLINGS)
        if pooling is None and model_pooling.missing:
            raise bad(
                "pooling",
                f"pooling must be {' or '.join(POOLINGS)} for this model: {model_pooling.missing}, "
                "which is not implemented",
            )
        form = EmbeddingForm(
            service.settings.names[0],
            dimensions=fields.integer("dimensions", 1, size) or size,
            base64_=fields.chosen("encoding_format", ("float", "base64")) == "base64",
            normalize=fields.flag("normalize", model_pooling.normalize),
        )
        priority = fields.integer("priority", -(2**31), MOST_ID) or 0
        salt = fields.text("cache_salt", MOST_SALT) or ""
        given = read_prompts(fields, "input", MOST_INPUTS)
        prompts = [
            service.shortened(fields, prompt)
            for prompt in await encoded_prompts(service, given, "input")
        ]
        for prompt in prompts:
            service.room(prompt, "input", min_new_tokens=0)
        await ResponseWriter(
            service=service,
            exchange=exchange,
            ticket=ticket,
            collector=service.embeddings(
                prompts, pooling or model_pooling.pooling, priority=priority, salt=salt
            ),
            form=form,
            arrived=arrived,
            num_choices=min(len(prompts), service.limits.batch),
        ).give()


class EmbeddingForm(WholeForm):
    """The response with a list of embeddings. Each is encoded on arrival, to keep the event loop
    responsive.

    Args:
        model: The model's name in the response.
        dimensions: The number of dimensions to keep of each embedding.
        base64_: Whether to encode embeddings as base64 of float32 bytes instead of lists.
        normalize: Whether to scale embeddings to the length 1.
    """

    def __init__(self, model: str, *, dimensions: int, base64_: bool, normalize: bool):
        self._model, self._dimensions = model, dimensions
        self._base64, self._normalize = base64_, normalize
        self._embeddings: dict[int, str | orjson.Fragment] = {}

    def take(self, piece: OutputChunk) -> None:
        if piece.embedding is not None:
            self._embeddings[piece.choice] = self._written(piece.embedding)

    def whole(self, collector: OutputCollector) -> dict[str, Any]:
        used = collector.prompt_tokens
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": embedding}
                for index, embedding in sorted(self._embeddings.items())
            ],
            "model": self._model,
            "usage": {"prompt_tokens": used, "total_tokens": used},
        }

    def _written(self, embedding: Float[np.ndarray, "hidden"]) -> str | orjson.Fragment:
        found = embedding[: self._dimensions]
        if self._normalize:
            found = found / max(float(np.linalg.norm(found)), np.finfo(np.float32).tiny)
        found = np.ascontiguousarray(found, "<f4")
        if self._base64:
            return base64.b64encode(found).decode()
        return orjson.Fragment(orjson.dumps(found, option=orjson.OPT_SERIALIZE_NUMPY))
