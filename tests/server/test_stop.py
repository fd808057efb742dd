"""Stop strings: no text is lost, none comes too early, and the first stop string wins."""

from hypothesis import given
from hypothesis import strategies as st

from jaxattn.engine.requests.outputs import TokenEvent
from jaxattn.engine.requests.request import Request
from jaxattn.server.decoding.output_collector import ChoiceDetokenizer
from jaxattn.server.decoding.stop_strings import StopStrings, StopText
from jaxattn.text import ByteTokenizer

LETTERS = st.text("ab", max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


@given(pieces=st.lists(LETTERS, max_size=6), stops=STOPS, included=st.booleans())
def test_pieces_give_what_the_whole_text_gives(pieces, stops, included):
    whole = "".join(pieces)
    reader, said, found = StopStrings(stops, included=included), "", None
    for piece in pieces:
        text, found = reader.push(piece)
        said += text
        if found is not None:
            break
    else:
        said += reader.end()
    if found is None:
        assert said == whole and not any(stop in whole for stop in stops)
    else:
        assert (
            said + ("" if included else found)
            == whole[: len(said) + (0 if included else len(found))]
        )
        assert not any(stop in said for stop in stops) or included


@given(text=LETTERS, stops=STOPS)
def test_no_more_waits_than_can_begin_a_stop_string(text, stops):
    reader = StopStrings(stops)
    said, found = reader.push(text)
    if found is None:
        held = text[len(said) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


@given(
    said=st.text("abé", max_size=12),
    stops=st.lists(st.text("abé", min_size=1, max_size=3), max_size=3),
)
def test_a_row_ends_with_the_token_that_ends_its_text(said, stops):
    stop_text = StopText(ByteTokenizer().stream(), stops)
    choice = ChoiceDetokenizer(0, ByteTokenizer().stream(), StopStrings(stops))
    for token in said.encode():
        ends = stop_text(token)
        piece = choice.take([TokenEvent(Request(b"a"), token)])
        assert ends == choice.done == (piece.finish == "stop")
        if ends:
            break
