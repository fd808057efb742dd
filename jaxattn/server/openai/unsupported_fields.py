"""Fields of OpenAI's and vLLM's requests that this server does not support.

The server accepts such a field only with a neutral value, because an answer that ignores it would
not be the requested one. It ignores fields that neither API defines.
"""

from jaxattn.server.http.errors import bad
from jaxattn.server.http.json_fields import JsonFields

# Field -> its neutral values, in addition to null.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "suffix": ("",),
    "use_beam_search": (False,),
    "chat_template": (),
    "documents": ([],),
    "functions": ([],),
    "function_call": ("none",),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "web_search_options": (),
}


def refuse_unsupported(fields: JsonFields) -> None:
    """Raises ApiError 400 for an unsupported field whose value is not neutral."""
    for name, neutral in NEUTRAL.items():
        value = fields.values.get(name)
        if value is not None and not any(value == each for each in neutral):
            raise bad(name, f"{name} is not supported; leave it out")
