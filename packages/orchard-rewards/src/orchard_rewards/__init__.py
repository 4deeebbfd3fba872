"""Rewards: how an episode is judged, each score with its evidence."""
