"""How one forward pass is seen from inside: traced, selected from, tapped and watched."""
