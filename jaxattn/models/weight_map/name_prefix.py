"""The prefix of a folder's tensor names, for a text model by itself or inside a larger model.

model.                  the text model; families place their tensors under these names
model.language_model.   in a model with a vision tower, as transformers 5 saves it
language_model.model.   the same as publishers and transformers 4 spell it; transformers 5.24
                        writes Kimi-K2.5's layers as "blocks" there
language_model.         the text model without its head, inside another one
(none)                  the text model without its head, saved by itself
"""

import dataclasses
from collections.abc import Iterable

PLAIN, HEAD = "model.", "lm_head."
NESTED = "language_model.model."  # whose head is nested too
PREFIXES = (PLAIN, "model.language_model.", NESTED, "language_model.", "")


@dataclasses.dataclass(frozen=True)
class TensorPrefix:
    """A folder's spelling of the names "model.*" and "lm_head.*" of a family.

    Attributes:
        layers: Prefix instead of "model.".
        head: Prefix instead of "lm_head.".
        numbered: The word before a layer's number.
    """

    layers: str = PLAIN
    head: str = HEAD
    numbered: str = "layers"

    @classmethod
    def of(cls, names: Iterable[str]) -> "TensorPrefix":
        """Returns the spelling of a folder with these names, or a family's own if none fits."""
        names = list(names)
        for layers in PREFIXES:
            for word in ("layers", "blocks") if layers == NESTED else ("layers",):
                if any(name.startswith(f"{layers}{word}.") for name in names):
                    nested = layers == NESTED and not any(name.startswith(HEAD) for name in names)
                    return cls(layers, f"language_model.{HEAD}" if nested else HEAD, word)
        return cls()

    def spelled(self, name: str) -> str:
        """Converts a family's name to the folder's spelling."""
        name = _replaced(name, (PLAIN, self.layers), (HEAD, self.head))
        return _replaced(name, (f"{self.layers}layers.", f"{self.layers}{self.numbered}."))

    def plain(self, name: str) -> str:
        """Converts a folder's name to the families' spelling; other parts' names do not change."""
        if self.layers or name.startswith(("layers.", "embed", "word_embeddings.", "norm.")):
            name = _replaced(name, (f"{self.layers}{self.numbered}.", f"{self.layers}layers."))
            return _replaced(name, (self.head, HEAD), (self.layers, PLAIN))
        return name


def _replaced(name: str, *pairs: tuple[str, str]) -> str:
    for old, new in pairs:
        if name.startswith(old):
            return new + name[len(old) :]
    return name
