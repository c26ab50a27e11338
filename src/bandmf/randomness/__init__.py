"""Everything that comes from the secret key: the key, its cipher and streams, and generators that a run borrows."""
