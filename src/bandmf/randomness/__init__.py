"""Everything that comes from the secret key: the cipher, its streams, and the key itself."""
