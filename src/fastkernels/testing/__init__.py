"""What a route must pass: comparators, hostile inputs, contracts, timers. Not imported by the package."""
