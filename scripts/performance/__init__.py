"""Tables and the plot of the docs, generated from the stored runs of the bench."""
