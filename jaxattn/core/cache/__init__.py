"""Cache formats, page tables, state slots and symmetric buffers."""
