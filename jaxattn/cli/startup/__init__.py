"""Startup of a command's engine: model source, compile cache, hosts and progress."""
