"""One port before several replicas: who gets a request, and what is asked of all."""
