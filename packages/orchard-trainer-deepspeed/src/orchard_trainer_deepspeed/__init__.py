"""Learner, policy server, losses, advantages and weight stores for models that one process can hold."""
