"""Known fields of OpenAI's and vLLM's requests that this server has no answer to.

Such a field may hold what changes nothing; another value is refused, since an answer without it
would not be what was asked for. Fields that nobody knows are ignored.
"""

from jaxattn.server.http.errors import bad
from jaxattn.server.http.json_fields import JsonFields

# Field -> the values that change nothing, beside null.
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
    """Raises ApiError 400 for a field whose value asks for what is not there."""
    for name, neutral in NEUTRAL.items():
        value = fields.values.get(name)
        if value is not None and not any(value == each for each in neutral):
            raise bad(name, f"{name} is not supported; leave it out")
