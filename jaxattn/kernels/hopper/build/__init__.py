"""The launch of a kernel's body, parallel compilation and the cache of traces."""
