"""Model definitions, and the registry that maps architecture names to them."""
