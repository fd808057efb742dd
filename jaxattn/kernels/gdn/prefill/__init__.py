"""The chunked delta rule: work within chunks, then the pass of the state over chunks."""
