"""The gated delta rule; `jaxattn.gdn` is the public module."""
