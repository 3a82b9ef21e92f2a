"""``AsyncLLM(model, dp=N)``: replicas in processes of their own."""
