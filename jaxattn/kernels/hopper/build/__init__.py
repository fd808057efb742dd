"""The launch of a kernel body, parallel compilation and the cache of traces."""
