"""The running service: the engine's thread, admission, metrics, state and watchdog."""
