"""One file per memory; the registry imports them all, nothing else registers them."""
