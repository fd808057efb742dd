"""What a request may ask of its tokens beside temperature and filters: refused by name, or kept."""

import pytest

from jaxattn import Request


@pytest.mark.parametrize(
    "options, message",
    [
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0"),
        ({"presence_penalty": float("inf")}, "presence_penalty must be finite"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty must be finite"),
        ({"logprobs": 21}, "logprobs must be from 0 to 20; got 21"),
        ({"logit_bias": {3: 101}}, r"logit_bias\[3\] must be from -100 to 100; got 101"),
        ({"logit_bias": {i: 1.0 for i in range(301)}}, "logit_bias has 301 tokens; at most 300"),
        ({"priority": 2**31}, "priority must be an int32"),
    ],
)
def test_a_control_out_of_range_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        Request(b"x", **options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"logit_bias": 5}, "logit_bias must map tokens to numbers, got 5"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias: a token must be an integer"),
        ({"logit_bias": {1: "a"}}, r"logit_bias\[1\] must be a number"),
        ({"logprobs": 1.5}, "logprobs must be an integer"),
        ({"presence_penalty": "a"}, "presence_penalty must be a number"),
    ],
)
def test_a_control_of_another_type_is_refused_by_name(options, message):
    with pytest.raises(TypeError, match=message):
        Request(b"x", **options)


def test_biases_are_kept_as_pairs_in_the_order_of_tokens():
    request = Request(b"x", logit_bias={7: -1, 3: 2.5})
    assert request.logit_bias == ((3, 2.5), (7, -1.0))
    assert Request(b"x", logit_bias=request.logit_bias) == request
    assert hash(request)
