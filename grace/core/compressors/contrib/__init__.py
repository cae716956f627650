"""Methods of the literature: tested against their papers, and recommended by no measurement yet."""
