"""Process-wide state, garbage-collector pauses, and the guards of threads and compilation."""
