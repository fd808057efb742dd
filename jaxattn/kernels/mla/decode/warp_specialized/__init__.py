"""MLA decode of 64 packed rows per tile: three specialized warpgroups."""
