"""Other libraries at the shapes of the bench, available only in a checkout."""
