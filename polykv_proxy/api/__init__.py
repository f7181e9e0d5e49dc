"""Routes: what a request means, and what happens with it."""
