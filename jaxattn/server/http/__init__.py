"""One HTTP connection and request: limits, authentication, origins and errors."""
