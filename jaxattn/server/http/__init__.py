"""HTTP connections and requests: limits, authentication, allowed origins and errors."""
