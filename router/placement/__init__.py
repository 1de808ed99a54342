"""Where and when a request runs: admission, shares of tenants, prefix matches, predictions, routing. Pure."""
