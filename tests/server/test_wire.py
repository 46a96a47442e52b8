"""Messages between the two processes: what goes in comes out, however the bytes are cut."""

from hypothesis import given
from hypothesis import strategies as st

from stepfloor.request import Grammar, Piece, Request, SamplingParams, TokenLogprob
from stepfloor.server.wire import Frames, decode_submit, encode, encode_submit, pack_piece, unpack_piece

TEXT = st.text(max_size=8)
IDS = st.lists(st.integers(0, 2**31 - 1), max_size=6).map(tuple)
NUMBER = st.floats(-100, 100)
SAMPLING = st.builds(
    SamplingParams,
    temperature=NUMBER,
    top_k=st.integers(-1, 9),
    logit_bias=st.lists(st.tuples(st.integers(0, 9), NUMBER), max_size=2).map(tuple),
    forbidden_ids=IDS,
    seed=st.none() | st.integers(-(2**63), 2**63),
)
REQUEST = st.builds(
    Request,
    request_id=TEXT,
    token_ids=IDS,
    sampling=SAMPLING,
    max_tokens=st.integers(1, 9),
    stop_token_ids=IDS,
    stop=st.lists(TEXT, max_size=2).map(tuple),
    min_tokens=st.integers(0, 3),
    logprobs=st.none() | st.integers(0, 20),
    grammar=st.none() | st.builds(Grammar, st.just("regex"), TEXT, st.none() | TEXT),
    include_stop=st.booleans(),
    skip_special_tokens=st.booleans(),
)
PIECE = st.builds(
    Piece,
    request_id=TEXT,
    token_ids=IDS,
    deltas=st.lists(TEXT, max_size=3).map(tuple),
    finish_reason=st.sampled_from([None, "stop", "length", "error"]),
    stop_reason=st.none() | TEXT | st.integers(0, 9),
    error=st.none() | TEXT,
    logprobs=st.lists(
        st.builds(TokenLogprob, NUMBER, st.lists(st.tuples(st.integers(0, 9), NUMBER), max_size=2).map(tuple)),
        max_size=2,
    ).map(tuple),
)


@given(st.lists(st.lists(REQUEST, min_size=1, max_size=3), max_size=3), st.integers(1, 50))
def test_requests_arrive_whole(groups: list[list[Request]], cut: int) -> None:
    data = b"".join(encode_submit(group, 1.5) for group in groups)
    frames = Frames()
    messages = [m for at in range(0, len(data), cut) for m in frames.feed(data[at : at + cut])]
    assert [decode_submit(message, ids) for message, ids in messages] == groups
    assert all(message["deadline_s"] == 1.5 for message, _ in messages)


@given(st.lists(PIECE, max_size=4))
def test_pieces_arrive_whole(pieces: list[Piece]) -> None:
    ((message, _),) = Frames().feed(encode({"type": "pieces", "pieces": [pack_piece(piece) for piece in pieces]}))
    for piece, packed in zip(pieces, message["pieces"], strict=True):
        arrived = unpack_piece(packed)
        if piece.finish_reason is None and not piece.logprobs:
            # what ended a request comes with its end
            assert (arrived.token_ids, arrived.deltas) == (piece.token_ids, piece.deltas)
        else:
            assert arrived == piece
