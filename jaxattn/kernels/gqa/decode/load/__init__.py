"""The producer warpgroup: queries, pages and prefetches."""
