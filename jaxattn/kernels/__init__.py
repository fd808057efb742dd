"""Mosaic GPU kernels for Hopper, one folder or file per kernel; `jaxattn.ops` has their
references."""
