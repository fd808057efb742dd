"""The endpoints /tokenize, /detokenize and /tokenizer_info.

The first two count in the admission control as other requests do, as their texts may be as long.
"""

from collections.abc import Sequence

from jaxattn.server.decoding.sampling_params import MOST_ID
from jaxattn.server.decoding.tool_choice import read_tools
from jaxattn.server.http.request import HttpRequest
from jaxattn.server.openai.chat_completions import encoded
from jaxattn.server.openai.completions import encoded_prompts
from jaxattn.server.openai.unsupported_fields import refuse_unsupported
from jaxattn.server.runtime.service import Service

MOST_TOKENS = 2**20


async def tokenize(service: Service, exchange: HttpRequest) -> None:
    """Answers with the tokens of `prompt`, or of `messages` in the model's chat template."""
    with service.entered():
        fields = await exchange.fields()
        service.check_model(fields)
        refuse_unsupported(fields)
        tokens: Sequence[int]
        prompt = fields.text("prompt")
        if prompt is not None:
            [tokens] = await encoded_prompts(service, [prompt], "prompt")
        elif fields.given("messages"):
            tokens = await encoded(service, fields, read_tools(fields).tools)
        else:
            raise fields.wrong("prompt", "a string, unless messages is given")
        most = service.limits.max_model_len
        found = {"count": len(tokens), "max_model_len": most, "tokens": list(tokens)}
        await exchange.json(found)


async def detokenize(service: Service, exchange: HttpRequest) -> None:
    """Answers with the text of `tokens`, including special tokens."""
    with service.entered():
        fields = await exchange.fields()
        service.check_model(fields)
        if not fields.given("tokens"):
            raise fields.wrong("tokens", "a list of integers")
        tokens = fields.integers("tokens", MOST_TOKENS, MOST_ID)
        text = await service.in_thread(
            lambda: service.tokenizer.decode(tokens, skip_special_tokens=False)
        )
        await exchange.json({"prompt": text})


async def tokenizer_info(service: Service, exchange: HttpRequest) -> None:
    """Answers with the vocabulary sizes, the special tokens and the chat template."""
    tokenizer = service.tokenizer
    special = {str(id): text for id, text in sorted(tokenizer.special_tokens.items())}
    await exchange.json(
        {
            "tokenizer_class": type(tokenizer).__name__,
            "vocab_size": tokenizer.vocab_size,
            "model_vocab_size": service.served.vocab_size,
            "model_max_length": service.limits.max_model_len,
            "eos_token_ids": list(tokenizer.stop_tokens),
            "special_tokens": special,
            "chat_template": tokenizer.chat_template or None,
        }
    )
