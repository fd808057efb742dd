"""What callers give and get: requests, outputs, ids and statistics."""
