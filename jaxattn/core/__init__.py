"""What ops share: checks, dispatch, formats, slots, pages. It knows no op and no model."""
