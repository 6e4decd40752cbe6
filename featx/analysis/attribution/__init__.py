"""Why a model said what it said: heat maps, and pictures of them."""
