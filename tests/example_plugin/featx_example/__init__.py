"""Members of featx that another distribution adds; docs/plugins.md explains them."""
