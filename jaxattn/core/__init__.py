"""Code that ops share: checks, dispatch, cache formats, slots, pages. It imports no op or model."""
