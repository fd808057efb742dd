"""The gated delta rule and Kimi Delta Attention: decode and chunked prefill."""
