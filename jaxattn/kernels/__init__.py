"""Mosaic GPU kernels for Hopper, one folder or file each; references are in `jaxattn.ops`."""
