"""The chunked delta rule: chunk.py works on chunks alone, state_pass.py goes through them."""
