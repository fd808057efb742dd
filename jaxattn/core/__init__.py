"""Code that ops share: checks, dispatch, formats, slots and pages. It knows no op and no model."""
