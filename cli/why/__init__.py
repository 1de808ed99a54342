"""`quire why`: gathers the records of requests, and chooses which requests to explain."""
