"""Serving: requests, batches, compiled steps, the memory plan and the recompilation guard."""

from jaxattn.engine.engine import Engine as Engine
from jaxattn.engine.requests.outputs import Completion as Completion
from jaxattn.engine.requests.request import Request as Request
