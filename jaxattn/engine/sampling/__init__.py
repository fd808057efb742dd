"""From logits to tokens on the device: sampling, penalties, log-probabilities, grammar bitmasks."""
