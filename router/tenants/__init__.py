"""Who calls: API keys, tenants and their cache domains, read from an operator's file."""
