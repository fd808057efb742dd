"""Where a published tensor goes, and which transform it takes on the way."""
