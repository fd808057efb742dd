"""The gated delta rule within one chunk."""
