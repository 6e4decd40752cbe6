"""Attribution: heat maps of the pixels that a prediction depends on, and contact sheets of them."""
