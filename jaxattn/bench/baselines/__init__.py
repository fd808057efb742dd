"""Other libraries at the shapes of the bench. They run from a checkout; no wheel has them."""
