"""Mosaic GPU kernels for Hopper, one a file; the references are `jaxattn.mla` and `jaxattn.gdn`."""
