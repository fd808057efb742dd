"""Decode of the gated delta rule: gdn/decode/launch.py starts it, gdn/decode/mainloop.py is one block's work."""
