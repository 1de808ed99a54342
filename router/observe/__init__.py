"""What the router shows of itself: metrics, decision records, spans, status."""
