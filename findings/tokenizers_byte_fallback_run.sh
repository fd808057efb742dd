#!/usr/bin/env bash
# tokenizers' ByteFallback decoder loses a valid character next to a bad byte, which SentencePiece keeps.
#
# Seen with tokenizers 0.23.3 and sentencepiece 0.2.3. Vocabularies with byte fallback, as those of Llama 2 and Gemma,
# spell a rare character by tokens such as <0xF0>. The decoder joins a run of these tokens. If the run as a whole is not
# UTF-8, each of its bytes becomes U+FFFD, those of complete characters too. SentencePiece, from which the format comes,
# replaces only the bad bytes. An answer that ends inside its second emoji thus loses the first one as well. In a
# stream, text that was shown changes: an emoji and the first byte of another are five U+FFFD, and with its other bytes
# two emoji.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q tokenizers==0.23.3 sentencepiece==0.2.3
"$work/venv/bin/python" - <<'PY'
import io

from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers.decoders import ByteFallback

model = io.BytesIO()
SentencePieceTrainer.train(
    sentence_iterator=iter(["hello world", "low lower lowest"] * 20), model_writer=model, vocab_size=300,
    byte_fallback=True, hard_vocab_limit=False, model_type="bpe", minloglevel=2,
)
processor = SentencePieceProcessor(model_proto=model.getvalue())


def decoded(data):
    """What tokenizers and SentencePiece make of the tokens of some bytes."""
    pieces = [f"<0x{byte:02X}>" for byte in data]
    return ByteFallback().decode(pieces), processor.decode([processor.piece_to_id(each) for each in pieces])


smile, bad = "\N{GRINNING FACE}", "\N{REPLACEMENT CHARACTER}"
seen = {}
for data in (smile.encode(), smile.encode() + b"\xf0", smile.encode() * 2, b"\xff" + smile.encode()):
    seen[data] = decoded(data)
    print(data, "tokenizers, sentencepiece:", *map(ascii, seen[data]))
assert list(seen.values()) == [
    (smile, smile), (bad * 5, smile + bad), (smile * 2, smile * 2), (bad * 5, bad + smile),
], seen
PY
