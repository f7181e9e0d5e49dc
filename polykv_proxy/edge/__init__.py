"""HTTP/1.1 bytes: the client side, the engine side, and the splice between them."""
