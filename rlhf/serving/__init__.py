"""`rlhf serve`: models behind an API, and the page on which people compare and rank answers."""
