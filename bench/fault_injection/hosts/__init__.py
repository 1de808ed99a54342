"""Services on hosts of their own, which are network namespaces, and what can fail between them."""
