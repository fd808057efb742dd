"""Translation of the patterns of JSON schemas into llguidance's regular expressions.

Schemas use ECMAScript's syntax, llguidance uses Rust's. In Rust, a `[` within a class begins
another class, and `&&`, `--` and `~~` are operators.

If a class contains a control character that JSON cannot escape briefly, as `[^"]` does, llguidance
also allows an escaped quote or backslash. The translation therefore removes these control
characters from classes.
"""

# U+0000 to U+001F except \b, \t, \n, \f and \r: JSON can only write them as \u00XX.
_UNNAMED = r"[\x00-\x07\x0b\x0e-\x1f]"


def exact_pattern(pattern: str) -> str:
    """Returns the pattern in Rust's syntax. A malformed pattern stays as it is: llguidance will
    reject it."""
    parts: list[str] = []
    at = 0
    while at < len(pattern):
        if pattern[at] == "\\":
            parts.append(pattern[at : at + 2])
            at += 2
        elif pattern[at] == "[":
            end = _class_end(pattern, at)
            if end is None:
                return pattern
            parts.append(_class(pattern[at + 1 : end]))
            at = end + 1
        else:
            parts.append(pattern[at])
            at += 1
    return "".join(parts)


def _class_end(pattern: str, at: int) -> int | None:
    """Returns the position of the bracket that ends a class; None if it is missing."""
    at += 1
    while at < len(pattern) and pattern[at] != "]":
        at += 2 if pattern[at] == "\\" else 1
    return at if at < len(pattern) else None


def _class(inner: str) -> str:
    if inner == "":
        return r"[^\s\S]"  # no character
    if inner == "^":
        return r"[\s\S]"  # any character
    negated, inner = inner.startswith("^"), inner.removeprefix("^")
    parts: list[str] = []
    at = 0
    while at < len(inner):
        length = 2 if inner[at] == "\\" else 1
        each = inner[at : at + length]
        parts.append("\\" + each if each in "[&~" else each)
        at += length
    spelled = "".join(parts).replace("--", r"-\-")
    return f"[[{'^' if negated else ''}{spelled}]--{_UNNAMED}]"
