"""Other libraries on the same shapes, timed by the same method."""
