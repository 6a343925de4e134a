"""Device memory: bytes over time, and the tables made from them."""
