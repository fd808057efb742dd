"""Writes tests/data/chat/expected.json: transformers' rendering of each template and case.

python -m tests.helpers.make_chat_expected      # needs transformers, which no test needs
"""

import json

from transformers.utils.chat_template_utils import (
    _normalize_chat_messages,
    render_jinja_template,
)

from tests.helpers.chat_cases import CASES, DATA, EXPECTED, NAMES, SPECIAL, as_authors_expect


def kept_content(messages: list[dict]) -> list[dict]:
    """Sets a missing content to None, as DeepSeek's template expects."""
    return [{**message, "content": message.get("content")} for message in messages]


def main() -> None:
    texts: dict[str, dict[str, str]] = {}
    for name in NAMES:
        source = (DATA / f"{name}.jinja").read_text()
        for case, (messages, tools, prompt, variables) in CASES.items():
            [text], _ = render_jinja_template(
                [kept_content(_normalize_chat_messages(as_authors_expect(name, messages)))],
                tools=tools,
                chat_template=source,
                add_generation_prompt=prompt,
                **SPECIAL,
                **variables,
            )
            texts.setdefault(name, {})[case] = text
    EXPECTED.write_text(json.dumps(texts, ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    main()
