"""What a user of Orchard runs: the `orchard` command, the rollout engine, run folders and reports."""
