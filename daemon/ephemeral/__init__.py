"""A cluster for ranks that nothing has started one for: it comes with their first world, and goes with them."""
