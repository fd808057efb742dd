"""MLA decode for few packed rows and for FP8 caches: heads are the N side of wgmma."""
