"""GET /metrics: tables of what is measured, and their text for Prometheus."""
