"""The embedded `local` environment: sandboxes on this Linux machine, without a daemon."""
