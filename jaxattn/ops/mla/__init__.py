"""Multi-head latent attention; `jaxattn.mla` is the public module."""
