"""MLA decode of few packed rows and FP8 caches: heads are the N side of wgmma."""
