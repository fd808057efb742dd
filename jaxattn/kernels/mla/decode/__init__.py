"""MLA decode: entry, outputs, workspace, split-KV combine, and two mainloops."""
