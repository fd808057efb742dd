"""Decode of the gated delta rule: launch.py starts it, body.py is one block's work."""
