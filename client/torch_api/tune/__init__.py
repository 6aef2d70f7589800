"""The job tunes itself: compares settings while it trains, and keeps the best."""
