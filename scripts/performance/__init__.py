"""Tables and the picture of the docs, made from the stored runs of the bench."""
