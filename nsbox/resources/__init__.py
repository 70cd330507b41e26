"""Things on the host that have a life: each is taken before a launch and given back after it."""
