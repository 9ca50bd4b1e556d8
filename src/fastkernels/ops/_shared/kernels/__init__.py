"""Device code that several operators share."""
