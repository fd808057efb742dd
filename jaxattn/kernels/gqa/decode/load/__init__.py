"""The producer warp: queries, pages and prefetches."""
