"""What a route must pass: comparators, hostile inputs, contracts, timers."""
