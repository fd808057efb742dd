"""The running service: the device thread, admission control, metrics, state and watchdog."""
