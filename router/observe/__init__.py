"""Observability of the router: metrics, decision records, spans, status."""
