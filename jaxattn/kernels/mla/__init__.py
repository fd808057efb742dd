"""Multi-head latent attention: cache append, decode and prefill."""
