"""Where the time of one rank went: on its device, on its host, and in the iterations of its training."""
