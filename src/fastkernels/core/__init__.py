"""The machinery under every operator: specs, checks, routes, tables, dispatch."""
