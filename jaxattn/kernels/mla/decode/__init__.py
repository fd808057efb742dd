"""MLA decode: launch, outputs, workspace, split-KV combine, and two mainloops."""
