"""One file per method; the registry imports them all, nothing else registers them."""
