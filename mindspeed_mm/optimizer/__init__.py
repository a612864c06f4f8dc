"""Parameter groups, optimizers, schedules and gradient clipping."""
