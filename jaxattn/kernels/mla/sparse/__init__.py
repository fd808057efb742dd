"""MLA attention over a list of positions for each token."""
