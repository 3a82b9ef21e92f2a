"""Requests to simulate that no scheduler has recorded, and what none can beat with them."""
