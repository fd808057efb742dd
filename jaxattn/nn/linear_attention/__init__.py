"""Delta-rule layers: the gated delta rule and Kimi Delta Attention."""
