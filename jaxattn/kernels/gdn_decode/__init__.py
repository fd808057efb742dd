"""Decode of the gated delta rule with a few recent tokens beside each state."""
