"""The pass of the recurrent state over chunks, and the output."""
